import click

from titans_pt.commands._arguments import settings, whole

SECTION = "tools"
TOKENS = 512
"""Most tokens of a check whose number the user does not give."""


@click.command()
@settings
@click.option(
    "--tokens", type=whole(2), metavar="N",
    help=f"tokens that are read, more than a segment and a chunk (default: data.seq_len, at most {TOKENS})",
)  # fmt: skip
def check(config, tokens: int | None):
    """Check that the model's mixers and memory rules keep their promises.

    No token sees a later one, rows are independent, cuts change nothing, documents see nothing before them, and a
    memory equals its token-by-token definition. It needs no data.
    """
    from titans_pt.inspection.promises import check_promises

    check_promises(config.model, tokens or min(config.data.seq_len, TOKENS), config.run.seed)
