import click

from titans_pt.commands._arguments import checkpoint_step, run_folder

SECTION = "tools"


@click.command()
@run_folder
@click.option("--out", type=click.Path(), required=True, metavar="DIR", help="the Hugging Face folder to write")
@checkpoint_step
def export(run: str, out: str, step: int | None):
    """Write a checkpoint as a Hugging Face folder."""
    from titans_pt.huggingface import export_run

    print(export_run(run, out, step=step))
