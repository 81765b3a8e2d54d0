"""``titans recall`` and ``titans needles``: short forms of these studies, with all models from one config file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titans_pt.config import Config
from titans_pt.config.checks import mixers_of
from titans_pt.config.files import keys_of, load_config
from titans_pt.errors import UserError
from titans_pt.models.mixers.common import any_memory
from titans_pt.reproduce.measures import Measure
from titans_pt.reproduce.order import Order
from titans_pt.reproduce.reproduce import reproduce
from titans_pt.reproduce.studies import needles_in_noise, study
from titans_pt.reproduce.study import TITANS, VARIANTS, Row, Study

PLAIN = "plain"
"""Word on the command line for a model without changes."""


def recall(
    file: str, words: Sequence[str], models: Sequence[str] | None, changes: Sequence[str] | None, ranks: int | None
) -> int:
    """Train every model with every change, one change after the other; return 0, or 128 + the signal that stopped it.

    Without ``changes``, every model is trained unchanged, and a model with a Titan's memory also with the memory off.

    Args:
        file: a config or its name; its run.dir holds everything, and all runs have its run.seed.
        words: settings over the file's.

    Raises:
        UserError: an unknown model or change, a change of the memory for a model without one, or a wrong setting.
    """
    config = _config("recall", file, words)
    models = _models(models, config, words) or list(TITANS)
    memory = {model: any_memory(mixers_of(model)) for model in models}
    for change in changes or ():
        if change != PLAIN and change not in VARIANTS:
            raise UserError(f"--changes: given {change!r}; allowed: {', '.join([PLAIN, *filter(None, VARIANTS)])}")
        without = [model for model in models if not memory[model]]
        if without and any(word.startswith("model.memory.") for word in VARIANTS.get(change, ())):
            raise UserError(f"--changes: given {change!r}, but {without[0]} has no Titan's memory; give it plain")
    if changes:
        rows = [Row(model, "" if change == PLAIN else change) for change in changes for model in models]
    else:
        rows = [Row(model) for model in models] + [Row(model, "memory-off") for model in models if memory[model]]
    return _run(study("recall", "tiny"), rows, config, file, words, ranks)


def needles(
    file: str, words: Sequence[str], models: Sequence[str] | None, asked: Sequence[int], counts: Sequence[int],
    answers: int, noise: str, ranks: int | None,
) -> int:  # fmt: skip
    """Train every model and evaluate it at every length; otherwise like :func:`recall`.

    Args:
        asked: lengths to evaluate, in tokens.
        counts: numbers of needles in an evaluated sample; (): as in training.
        answers: minimum number of answers for each length and count.
        noise: "seen" or "unseen".
    """
    told = [f"evaluation.needles.lengths={sorted(asked)}", f"evaluation.needles.answers={answers}",
            f"evaluation.needles.noise={noise}"]  # fmt: skip
    told += [f"evaluation.needles.needles={list(counts)}"] if counts else []
    config = _config("needles", file, [*words, *told])  # questions that cannot be asked are refused before training
    models = _models(models, config, words) or [*TITANS, "swa"]
    for model in models:
        mixers_of(model)
    measure = Measure("-".join(["needles", *map(str, counts), *(["unseen"] if noise == "unseen" else [])]), "needles",
                      tuple(told))  # fmt: skip
    whole = needles_in_noise((measure,), {measure.name: sorted(asked)}, counts)
    return _run(whole, [Row(model) for model in models], config, file, words, ranks)


def _run(whole: Study, rows: Sequence[Row], config: Config, file: str, words: Sequence[str], ranks: int | None) -> int:
    order = Order(Path(config.run.dir), seeds=[config.run.seed], words=words, config=file)
    return reproduce(replace(whole, rows=tuple(rows)), order, ranks)


def _config(task: str, file: str, words: Sequence[str]) -> Config:
    """The settings; a UserError if they are of another task."""
    config = load_config(file, words)
    if config.task != task:
        raise UserError(f"{file}: of the task {config.task!r}; name a config with task={task}, such as {task}")
    return config


def _models(named: Sequence[str] | None, config: Config, words: Sequence[str]) -> Sequence[str]:
    """Models that the command line or the file names."""
    if named and "model.mixers" in keys_of(words):
        raise UserError("model.mixers: given beside --models, which sets it; leave it out")
    return named or models_of(config)


def models_of(config: Config) -> list[str]:
    """The model that the file or the command line names, such as ``mamba+swa`` if its layers differ; empty if
    model.mixers was not given."""
    return ["+".join(config.model.mixers)] if "mixers" in config.model.model_fields_set else []
