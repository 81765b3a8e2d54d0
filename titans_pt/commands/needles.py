import click

from titans_pt.commands._arguments import COUNTS, NAMES, config_name, overrides, real, study_ranks, whole, with_options

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
@click.option("--needles", "count", type=whole(1), metavar="N", help="needles in a training sample (needles.needles)")
@click.option(
    "--lengths", metavar="TOKENS[:PARTS],...",
    help="training lengths in order, with their shares of the steps (needles.lengths)",
)  # fmt: skip
@click.option(
    "--held-out", type=whole(0), metavar="N", help="noise tokens that training never draws (needles.held_out)"
)
@click.option(
    "--write-cost", type=real(lambda x: 0 <= x <= 1000, "a number from 0 to 1000"), metavar="X",
    help="weight of the cost on writing (model.memory.write_cost)",
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
    config: str, overrides: tuple[str, ...], models: list[str] | None, count: int | None, lengths: str | None,
    held_out: int | None, write_cost: float | None, asked: list[int], asked_needles: list[int] | None, answers: int,
    noise: str, ranks: int | None,
) -> int:  # fmt: skip
    """Train small models on needles and evaluate them far beyond their training length."""
    from titans_pt.reproduce import shorthand

    given = {
        "needles.needles": count, "needles.lengths": lengths and f"'{lengths}'", "needles.held_out": held_out,
        "model.memory.write_cost": write_cost,
    }  # fmt: skip
    words = with_options(overrides, given)
    return shorthand.needles(config, words, models, asked, asked_needles or (), answers, noise, ranks)
