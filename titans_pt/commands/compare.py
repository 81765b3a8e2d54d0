from pathlib import Path

import click

from titans_pt.commands._arguments import FILE, PATH, whole

SECTION = "evaluate"
WRITES = "--out"


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", type=PATH, help="runs, or folders of titans evaluate --out"
)
@click.option(
    "--task", metavar="NAME",
    help="draw accuracy against length on a needle or babilong task (default: tables of all runs, and their losses)",
)  # fmt: skip
@click.option("--out", type=FILE, default="runs/compare.png", metavar="FILE", help="the picture")
@click.option(
    "--checkpoint", "step", type=whole(0), metavar="STEP", help="compare at this step (default: each run's newest)"
)
def compare(runs: tuple[str, ...], task: str | None, out: Path, step: int | None):
    """Compare runs: settings that differ, losses, evaluations."""
    from titans_pt.evaluation import compare

    if task is None:
        compare.compare(runs, out, step=step)
    else:
        compare.compare_task(runs, task, out, step=step)
