import click

from titans_pt.commands._arguments import settings, whole

SECTION = "tools"


@click.command()
@settings
@click.option(
    "--tokens", type=whole(2), metavar="N",
    help="tokens that are read (default: more than a window and two segments, at most data.seq_len)",
)  # fmt: skip
def check(config, tokens: int | None):
    """Check that the model's mixers and memory rules keep their promises.

    No token sees a later one; rows are independent; reading a sequence in pieces changes nothing; documents see nothing
    before them; a memory equals its token-by-token definition. The check needs no data.
    """
    from titans_pt.inspection.promises import check_promises

    check_promises(config.model, config.data.seq_len, tokens, config.run.seed)
