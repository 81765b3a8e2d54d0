from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, PATH, overrides

SECTION = "tools"
WRITES = "--out"


@click.command("import")
@click.argument("folder", metavar="DIR", type=PATH, help="a Hugging Face folder that titans export wrote")
@overrides("settings of this machine, e.g. data.dir=data/fineweb")
@click.option("--out", type=FOLDER, required=True, metavar="RUN", help="the run folder to write")
def import_(folder: str, overrides: tuple[str, ...], out: Path):
    """Turn a folder that titans export wrote into a run."""
    from titans_pt.huggingface import import_run

    print(import_run(folder, out, overrides))
