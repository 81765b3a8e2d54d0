import click

from titans_pt.commands._arguments import NAMES, config_name, overrides, study_ranks

SECTION = "study"
WRITES = "run.dir"


@click.command()
@config_name
@overrides(option="--models")
@click.option(
    "--models", type=NAMES, metavar="NAMES",
    help="the models to train: mixers, or hybrids such as mamba+swa (default: model.mixers if it is given, "
    "else lmm,mac,mag,mal)",
)  # fmt: skip
@click.option(
    "--changes", type=NAMES, metavar="NAMES",
    help="variants to train: plain, memory-off, no-momentum, no-forgetting, depth-1, no-conv, no-ln "
    "(default: plain and, for Titans, memory-off)",
)  # fmt: skip
@study_ranks
def recall(
    config: str, overrides: tuple[str, ...], models: list[str] | None, changes: list[str] | None, ranks: int | None
) -> int:  # fmt: skip
    """Train small models on associative recall, with and without memory."""
    from titans_pt.reproduce import shorthand

    return shorthand.recall(config, overrides, models, changes, ranks)
