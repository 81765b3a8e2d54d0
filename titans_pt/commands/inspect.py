from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, PATH, checkpoint_step, run_folder, whole

SECTION = "study"
WRITES = "--out"


@click.command()
@run_folder
@click.option("--text", type=PATH, required=True, metavar="FILE", help="a text file (UTF-8); - is standard input")
@click.option("--max-tokens", type=whole(2), default=2048, metavar="N", help="maximum number of tokens to read")
@checkpoint_step
@click.option(
    "--out", type=FOLDER, metavar="DIR", help="folder of arrays and picture (default: RUN/inspection/step-XXXXXXXX)"
)
def inspect(run: str, text: str, max_tokens: int, step: int | None, out: Path | None):
    """Show what the memory finds surprising in a text."""
    from titans_pt import inspection

    inspection.inspect(run, text, out, max_tokens=max_tokens, step=step)
