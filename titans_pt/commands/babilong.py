from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, overrides, run_folder, whole

SECTION = "evaluate"
WRITES = "--out"


@click.command()
@run_folder
@overrides("evaluation.babilong.* settings")
@click.option("--samples", type=whole(1), default=1000, metavar="N", help="documents of each length and task")
@click.option("--out", type=FOLDER, required=True, metavar="DIR", help="folder for a file LENGTH.jsonl per length")
def babilong(run: str, overrides: tuple[str, ...], samples: int, out: Path):
    """Write BABILong's stories as documents to fine-tune on."""
    from titans_pt.evaluation.babilong import write_documents

    write_documents(run, overrides, samples, out)
