import click

from titans_pt.commands._arguments import COUNTS, NAMES, settings, whole

SECTION = "study"


@click.command()
@settings
@click.option("--models", type=NAMES, default="lmm,mac,mag,mal,swa", metavar="NAMES", help="the models to train")
@click.option("--needles", "count", type=whole(1), default=8, metavar="N", help="needles in a sample")
@click.option(
    "--lengths", default="96:8,256,512,1024,2048", metavar="TOKENS[:PARTS],...",
    help="training lengths in order, each with its share of the steps",
)  # fmt: skip
@click.option(
    "--asked", type=COUNTS, default="1024,2048,4096,8192,16384,32768,65536", metavar="TOKENS,...",
    help="lengths of evaluation",
)  # fmt: skip
def needles(config, models: list[str], count: int, lengths: str, asked: list[int]):
    """Train small models on needles and ask far beyond their training length."""
    from titans_pt.experiments.needles_in_noise import Curriculum, NeedlesInNoise, train_and_ask

    curriculum = Curriculum(lengths)
    task = NeedlesInNoise(config.model.vocab_size, min(curriculum.lengths), count)
    train_and_ask(config, models, task, curriculum, asked)
