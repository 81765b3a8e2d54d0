import click

SECTION = "tools"


@click.command("import")
@click.argument("folder", metavar="DIR", type=click.Path(), help="a Hugging Face folder that titans export wrote")
@click.option("--out", type=click.Path(), required=True, metavar="RUN", help="the run folder to write")
def import_(folder: str, out: str):
    """Turn a folder that titans export wrote into a run."""
    from titans_pt.huggingface import import_run

    print(import_run(folder, out))
