from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, PATH, overrides

SECTION = "tools"
WRITES = "--out"


@click.command("import")
@click.argument(
    "folder",
    metavar="DIR",
    type=PATH,
    help="a folder that titans export wrote; a Llama, Qwen2, Qwen3 or Mistral in Hugging Face's format; a GGUF file of "
    "one; or smollm2-135m, which is SmolLM2-135M-Instruct in 4 bits from a package",
)
@overrides("settings of this machine, e.g. data.dir=data/fineweb")
@click.option("--out", type=FOLDER, required=True, metavar="RUN", help="the run folder to write")
def import_(folder: str, overrides: tuple[str, ...], out: Path):
    """Turn a Hugging Face folder into a run."""
    from titans_pt.huggingface import import_run

    print(import_run(folder, out, overrides))
