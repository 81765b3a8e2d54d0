import click

from titans_pt.commands._arguments import NAMES, settings, whole

SECTION = "study"
WRITES = "run.dir"


@click.command()
@settings
@click.option(
    "--models", type=NAMES, metavar="NAMES",
    help="the models to train: mixers, or several in turns as in mamba+swa (default: model.mixers if it is given, "
    "else lmm,mac,mag,mal)",
)  # fmt: skip
@click.option(
    "--changes", type=NAMES, metavar="NAMES",
    help="what to remove from them: plain, memory-off, no-momentum, no-forgetting, linear-memory, no-conv, no-ln "
    "(default: plain and, of Titans, memory-off)",
)  # fmt: skip
@click.option("--pairs", type=whole(1), default=8, metavar="N", help="key-value pairs in a sample")
@click.option("--distance", type=whole(0), default=40, metavar="N", help="least tokens between pairs and queries")
def recall(config, models: list[str] | None, changes: list[str] | None, pairs: int, distance: int):
    """Train small models to recall, with memory and without."""
    from titans_pt.experiments import recall
    from titans_pt.experiments.mqar import MQAR
    from titans_pt.experiments.study import models_of

    models = models or models_of(config) or ["lmm", "mac", "mag", "mal"]
    task = MQAR(config.model.vocab_size, config.data.seq_len, pairs, distance)
    recall.recall(config, recall.chosen(models, changes), task)
