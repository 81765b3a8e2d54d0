import click

from titans_pt.commands._arguments import COUNTS, NAMES, config_name, overrides, study_ranks, whole

SECTION = "study"
WRITES = "run.dir"


@click.command()
@config_name
@overrides(option="--models")
@click.option(
    "--models", type=NAMES, metavar="NAMES",
    help="the models to train: mixers, or hybrids such as mamba+swa (default: model.mixers if it is given, "
    "else lmm,mac,mag,mal,swa)",
)  # fmt: skip
@click.option(
    "--asked", type=COUNTS, default="1024,2048,4096,8192,16384,32768,65536", metavar="TOKENS,...",
    help="lengths to evaluate; trained models are not trained again",
)  # fmt: skip
@click.option(
    "--asked-needles", type=COUNTS, metavar="N,...", help="needles in an evaluated sample (default: as in training)"
)
@click.option("--answers", type=whole(1), default=256, metavar="N", help="answers to evaluate at each length")
@click.option(
    "--noise", type=click.Choice(["seen", "unseen"]), default="seen",
    help="noise tokens of the evaluation; unseen: the held-out ones alone",
)  # fmt: skip
@study_ranks
def needles(
    config: str, overrides: tuple[str, ...], models: list[str] | None, asked: list[int],
    asked_needles: list[int] | None, answers: int, noise: str, ranks: int | None,
) -> int:  # fmt: skip
    """Train small models on needles and evaluate them far beyond their training length."""
    from titans_pt.reproduce import shorthand

    return shorthand.needles(config, overrides, models, asked, asked_needles or (), answers, noise, ranks)
