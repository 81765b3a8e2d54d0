from pathlib import Path

import click

from titans_pt.commands._arguments import FILE, whole

SECTION = "evaluate"
WRITES = "--out"


@click.command()
@click.option("--tokens", type=whole(2048), default=262_144, metavar="N", help="length of the stream")
@click.option("--seed", type=whole(0), default=0, metavar="N", help="random seed of needles and noise")
@click.option(
    "--out", type=FILE, default="titans-demo.png", metavar="FILE", help="picture, in the format that its name ends in"
)
def demo(tokens: int, seed: int, out: Path):
    """Watch a small memory keep eight needles in a long stream of noise, beside a window that loses them."""
    from titans_pt.library.demo import demo as show

    show(tokens, seed, out)
