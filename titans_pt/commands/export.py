from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, checkpoint_step, run_folder

SECTION = "tools"
WRITES = "--out"


@click.command()
@run_folder
@click.option("--out", type=FOLDER, required=True, metavar="DIR", help="the Hugging Face folder to write")
@checkpoint_step
def export(run: str, out: Path, step: int | None):
    """Write a checkpoint as a Hugging Face folder."""
    from titans_pt.huggingface import export_run

    print(export_run(run, out, step=step))
