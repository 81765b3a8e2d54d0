import click

from titans_pt.commands._arguments import settings

SECTION = "train"


@click.command()
@settings
def train(config) -> int:
    """Train a model, or continue its training from the newest complete checkpoint."""
    from titans_pt.training import loop

    return loop.train(config)
