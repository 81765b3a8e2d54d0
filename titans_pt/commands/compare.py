from pathlib import Path

import click

from titans_pt.commands._arguments import FILE, PATH, whole

SECTION = "evaluate"
WRITES = "--out"


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", type=PATH, help="runs, or folders of titans evaluate --out"
)
@click.option("--task", default="niah_single_1", metavar="NAME", help="a needle or babilong task")
@click.option("--out", type=FILE, default="runs/compare.png", metavar="FILE", help="the picture")
@click.option(
    "--checkpoint",
    "step",
    type=whole(0),
    metavar="STEP",
    help="step of the checkpoint (default: the newest evaluated one of each run)",
)
def compare(runs: tuple[str, ...], task: str, out: Path, step: int | None):
    """Draw accuracy against length for several runs in one picture."""
    from titans_pt.evaluation import compare

    compare.compare(runs, task, out, step=step)
