import click

from titans_pt.commands._arguments import checkpoint_step, run_folder, whole

SECTION = "study"


@click.command()
@run_folder
@click.option(
    "--text", type=click.Path(), required=True, metavar="FILE", help="a text file (UTF-8); - is standard input"
)
@click.option("--max-tokens", type=whole(2), default=2048, metavar="N", help="tokens of the text to read at most")
@checkpoint_step
def inspect(run: str, text: str, max_tokens: int, step: int | None):
    """See what the memory finds surprising in a text."""
    from titans_pt import inspection

    inspection.inspect(run, text, max_tokens=max_tokens, step=step)
