"""The order that a command line gives, and the runs that it requires."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titans_pt.benchmarks.training import SET
from titans_pt.config import Config
from titans_pt.config.files import check_free, load_config
from titans_pt.errors import UserError
from titans_pt.models.mixers.common import any_memory
from titans_pt.reproduce.measures import Measure
from titans_pt.reproduce.own import is_own, name_of, with_own
from titans_pt.reproduce.rates import Grid
from titans_pt.reproduce.runs import Choice, Run
from titans_pt.reproduce.study import TITANS, Row, Study
from titans_pt.reproduce.timing import Timing
from titans_pt.tasks import TASKS, task_of

RATES = {"tiny": Grid((2e-3, 4e-3, 8e-3), within=(2.5e-4, 6.4e-2))}
"""Learning rates to try, for sizes without a published rate for each model."""


@dataclass(frozen=True)
class Order:
    """Content of a command line.

    models: names as in the study's folder of configs/, or config files (.yaml) of own models; None: all of the study.
    seeds: None: the study's own. tokens: training tokens of each run; None: as configured. rates: the only learning
    rates to choose from; (): the study's rule. words: KEY=VALUE settings for every run. config: a file, or the name of
    one, that all models start from; None: the study's configs. With a config, the models of the study's rows are
    mixers, or several in turns as in ``mamba+swa``.
    """

    out: Path
    models: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    tokens: int | None = None
    rates: Sequence[float] = ()
    words: Sequence[str] = ()
    config: str | None = None


def chosen(study: Study, order: Order) -> Study:
    """``study`` with the rows of the models asked for.

    Raises:
        UserError: the study has no row of a model, or an own model cannot be compared with the others.
    """
    if order.models is None:
        return study
    study = with_own(study, list(filter(is_own, order.models)), order.words)
    models = [name_of(word) for word in order.models]
    known = list(dict.fromkeys(row.model for row in study.rows))
    for model in models:
        if model not in known:
            raise UserError(f"--models: given {model!r}; {study.target} has {', '.join(known)}; name an own model by "
                            "its config file (NAME.yaml)")  # fmt: skip
    return replace(study, rows=tuple(row for model in models for row in study.rows if row.model == model))


def seeds_of(study: Study, row: Row, order: Order) -> tuple[int, ...]:
    return tuple(sorted(set(order.seeds))) if order.seeds is not None else study.seeds.get(row.key, (0,))


def run_name(row: Row, seed: int) -> str:
    return f"{_label(row)}-s{seed}"


def _label(row: Row) -> str:
    """First part of the names of a row's runs."""
    return f"{row.model}-{row.variant}" if row.variant else row.model


def runs_of(study: Study, order: Order) -> list[Run]:
    """The runs of a study, the most useful first: first seeds come before second seeds.

    Raises:
        UserError: a setting is wrong, or the study sets it itself.
    """
    _check_words(study, order)
    if study.timed:
        return [_timing(study, row, order) for row in study.rows]
    planned = [(row, seed) for row in study.rows for seed in seeds_of(study, row, order)]
    runs: list[Run] = []
    choices = {row: _choice(study, row, order) for row in {row.chooses for row in study.rows}}
    measures: dict[str, tuple[Measure, ...]] = {}
    for row, seed in sorted(planned, key=lambda item: item[1]):  # stable: the study's order within a seed
        name = run_name(row, seed)
        config = _config(study, row, seed, order, name)
        before = [run for run in runs if run.name == _before(study, row, seed, order)]
        taken = measures[row.key] = measures.get(row.key) or _measures(study, config)  # the same for all seeds
        runs.append(Run(name, row.model, row.variant, config, taken, choices[row.chooses], tuple(before)))
    return runs


def _check_words(study: Study, order: Order):
    """Raises UserError for settings that the study sets itself, which its runs would therefore not get."""
    otherwise = "ask a trained run by titans evaluate" if order.config is None else "give its option (--help)"
    remedies = {word.partition("=")[0]: otherwise for measure in study.measures for word in measure.all_words()}
    if order.config is None:  # with a config, it holds the folder and the seed
        remedies |= {"run.dir": "give --out DIR", "run.seed": "give --seeds N,..."}
        remedies["model.mixers"] = "give --models NAMES"
        if order.rates or _own_rates(study):
            remedies["train.lr"] = "give --rates LR,..."
    if order.tokens is not None:
        remedies |= dict.fromkeys(("train.max_steps", "train.warmup_steps"), "give --tokens alone")
    if study.timed:
        remedies |= dict.fromkeys(SET, "time other lengths and batches by titans benchmark training")
    check_free(order.words, remedies)


def _own_rates(study: Study) -> Grid | None:
    """Learning rates that the study's rule tries; None without a rule."""
    return RATES.get(study.size) if study.rated else None


def _choice(study: Study, row: Row, order: Order) -> Choice | None:
    """Choice of a row's learning rate; None: the configured rate is used."""
    own, given = _own_rates(study), Grid(tuple(order.rates))
    probe = cache(lambda rate: _probe(study, row, rate, order))
    if own:
        return Choice(row, given, probe) if order.rates else Choice(row, own, probe, own.first)
    if not order.rates:
        return None
    seed = seeds_of(study, row, order)[0]
    name = run_name(row, seed)
    first = Run(name, row.model, row.variant, _config(study, row, seed, order, name))
    plain = (first.config.train.lr,)
    if study.probe_share == 1:
        probe = cache(lambda rate: first.at(rate, named=rate not in plain))
    return Choice(row, given, probe, plain)


def _before(study: Study, row: Row, seed: int, order: Order) -> str | None:
    """Name of the run from whose weights a row's run of ``seed`` starts; None without such a run."""
    if not row.after:
        return None
    first = Row(row.model, row.after)
    trained = seeds_of(study, first, order)
    return run_name(first, seed if seed in trained else trained[0])


def _measures(study: Study, config: Config) -> tuple[Measure, ...]:
    """Measures of a study that apply to a run: those whose suite the run's task has, and "chunks"."""
    suites = TASKS.find(config.task).suites
    own = tuple(m for m in study.measures if m.suite in suites or m.suite == "chunks")
    return tuple(m for m in own if not m.far) if any(m.far for m in own) and _grows(config) else own


def equal_size(file: str, mixers: str, words: Sequence[str]) -> tuple[str, ...]:
    """Settings that turn the config ``file`` into a model of ``mixers``, such as ``mamba+swa``.

    Unless model.mlp_hidden is given, a model without a memory gets wider MLPs, until no model with a memory has more
    parameters.
    """
    pattern = f"model.mixers=[{mixers.replace('+', ',')}]"
    config = load_config(file, [*words, pattern])
    if config.model.mlp_hidden or any_memory(config.model.kinds):
        return (pattern,)
    others = (load_config(file, [*words, f"model.mixers=[{name}]"]) for name in TITANS)
    missing = max(map(_parameters, others)) - _parameters(config)
    model = config.model
    wider = model.hidden + max(0, -(-missing // (3 * model.d_model * model.n_layers)))
    return pattern, f"model.mlp_hidden={wider}"


def _parameters(config: Config) -> int:
    return sum(p.numel() for p in _without_storage(config).parameters())


def _grows(config: Config) -> bool:
    """Whether the model's FLOPs per token grow with the length, as those of full attention do."""
    model: Any = _without_storage(config)  # a module with flops
    return model.flops(1 << 20).total > 2 * model.flops(1 << 16).total


def _without_storage(config: Config) -> nn.Module:
    with torch.device("meta"):
        return task_of(config).build_model()


def _timing(study: Study, row: Row, order: Order) -> Timing:
    name = f"speed-{row.key.replace('/', '-')}"
    config = _config(study, row, 0, replace(order, tokens=None), name)
    words = (*row.settings, *order.words)
    file = str(Path(study.config(row.model)).with_stem("{model}"))
    return Timing(name, row.model, row.variant, config, file=file, words=words,
                  lengths=study.timed, tokens=max(study.timed))  # fmt: skip


def _probe(study: Study, row: Row, rate: float, order: Order) -> Run:
    """Short run of a row at seed 0."""
    name = f"{_label(row)}-lr{rate:g}"
    whole = _config(study, row, 0, order, name)
    tokens = whole.train.max_steps * whole.train.batch_tokens // study.probe_share
    short = replace(order, tokens=tokens, words=[*order.words, f"train.lr={rate!r}"])
    return Run(name, row.model, row.variant, _config(study, row, 0, short, name))


def _config(study: Study, row: Row, seed: int, order: Order, name: str) -> Config:
    """Settings of the run ``name``."""
    own = (f"run.dir={order.out / 'runs' / name}", f"run.seed={seed}")
    file = order.config or study.config(row.model)
    size = equal_size(file, row.model, order.words) if order.config else ()
    before = _before(study, row, seed, order)
    start = (f"train.init_from={order.out / 'runs' / before}",) if before else ()
    words = [*size, *row.settings, *start, *order.words, *own]
    config = load_config(file, words)
    if order.tokens is None:
        return config
    steps = max(1, order.tokens // config.train.batch_tokens)
    # A warm-up of more than a fifth of a short run would leave little of it.
    warmup = min(config.train.warmup_steps, steps // 5)
    short = {"max_steps": steps, "warmup_steps": warmup}
    if config.train.decay_steps:
        short["decay_steps"] = min(config.train.decay_steps, steps - warmup)
    return load_config(file, [*words, *(f"train.{key}={value}" for key, value in short.items())])
