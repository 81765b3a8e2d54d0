import click

from titans_pt.commands._arguments import COUNTS, NAMES, real, settings, whole

SECTION = "study"
WRITES = "run.dir"


@click.command()
@settings
@click.option(
    "--models", type=NAMES, metavar="NAMES",
    help="the models to train: mixers, or several in turns as in mamba+swa (default: model.mixers if it is given, "
    "else lmm,mac,mag,mal,swa)",
)  # fmt: skip
@click.option("--needles", "count", type=whole(1), default=8, metavar="N", help="needles in a training sample")
@click.option(
    "--lengths", default="96:8,256,512,1024,2048", metavar="TOKENS[:PARTS],...",
    help="training lengths in order, each with its share of the steps",
)  # fmt: skip
@click.option("--held-out", type=whole(0), default=0, metavar="N", help="noise tokens that training never draws")
@click.option(
    "--write-cost", type=real(lambda x: 0 <= x <= 1000, "a number from 0 to 1000"), default=0.0, metavar="X",
    help="times the mean gate of writing: added to the loss of a step whose answers are right",
)  # fmt: skip
@click.option(
    "--asked", type=COUNTS, default="1024,2048,4096,8192,16384,32768,65536", metavar="TOKENS,...",
    help="lengths to ask at; what was trained before is not trained again",
)  # fmt: skip
@click.option(
    "--asked-needles", type=COUNTS, metavar="N,...", help="needles in a sample that is asked (default: as trained)"
)
@click.option("--answers", type=whole(1), default=256, metavar="N", help="at each length")
@click.option(
    "--noise", type=click.Choice(["seen", "unseen"]), default="seen",
    help="unseen: ask in the held-out noise tokens alone",
)  # fmt: skip
def needles(
    config, models: list[str] | None, count: int, lengths: str, held_out: int, write_cost: float, asked: list[int],
    asked_needles: list[int] | None, answers: int, noise: str,
):  # fmt: skip
    """Train small models on needles and ask far beyond their training length."""
    from titans_pt.experiments.needles import Questions, train_and_ask
    from titans_pt.experiments.needles_in_noise import Curriculum, NeedlesInNoise
    from titans_pt.experiments.study import models_of

    models = models or models_of(config) or ["lmm", "mac", "mag", "mal", "swa"]
    curriculum = Curriculum(lengths)
    task = NeedlesInNoise(config.model.vocab_size, min(curriculum.lengths), count, held_out)
    questions = Questions(asked, asked_needles or [count], answers, unseen=noise == "unseen")
    train_and_ask(config, models, task, curriculum, questions, write_cost)
