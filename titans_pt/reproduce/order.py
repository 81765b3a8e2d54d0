"""The order that a command line gives, and the runs that it requires."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from titans_pt.config import Config
from titans_pt.config.files import keys_of, load_config
from titans_pt.errors import UserError
from titans_pt.models.mixers.common import any_memory
from titans_pt.reproduce.measures import Measure
from titans_pt.reproduce.rates import PROBE_SHARE, Grid
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

    An own model, named by its config file, has the rows that every model of the study has.

    Raises:
        UserError: the study has no row of a model, or cannot compare an own model with the others.
    """
    if order.models is None:
        return study
    known = list(dict.fromkeys(row.model for row in study.rows))
    own: dict[str, str] = {}
    for word in order.models:
        if Path(word).suffix in (".yaml", ".yml"):
            own[_own_name(word, [*known, *own])] = word
        elif word not in known:
            raise UserError(
                f"--models: given {word!r}; {study.target} has {', '.join(known)}; name an own model by its config file"
            )
    models = {word: [row for row in study.rows if row.model == word] for word in known}
    if own:
        rows = {model: {(row.variant, row.settings, row.after) for row in models[model]} for model in known}
        shared = set.intersection(*rows.values())
        template = [row for row in models[known[0]] if (row.variant, row.settings, row.after) in shared]
        if not template:
            raise UserError(f"--models: given {next(iter(own.values()))!r}; the models of {study.target} share no row "
                            f"that an own model could have; choose another target, such as table1")  # fmt: skip
        for name, file in own.items():
            _check_own(study, known[0], file, order.words)
            models[name] = [replace(row, model=name) for row in template]
    named = {file: name for name, file in own.items()}
    return replace(study, rows=tuple(row for word in order.models for row in models[named.get(word, word)]), own=own)


def _own_name(file: str, taken: Sequence[str]) -> str:
    """Name of an own model: the file's, without its ending."""
    name = Path(file).stem
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise UserError(f"--models: given {file!r}, whose name becomes that of its runs; rename the file to letters, "
                        "digits, '.', '_' and '-'")  # fmt: skip
    if name in taken:
        raise UserError(f"--models: given {file!r}, but there is another model named {name!r}; rename the file")
    return name


def _check_own(study: Study, model: str, file: str, words: Sequence[str]):
    """Raises UserError unless the own model of ``file`` is trained on what the study's ``model`` is trained on."""
    beside = f"{study.folder or study.size}/{model}"
    ours, theirs = (_compared(load_config(each, words)) for each in (file, beside))
    for key, value in theirs.items():
        if ours[key] != value:
            raise UserError(f"{file}: {key} is {ours[key]!r}, and that of the models of {study.target} is {value!r}; "
                            f"begin the file with inherit: {beside}.yaml, or leave the setting out of it")  # fmt: skip


def _compared(config: Config) -> dict[str, object]:
    """Settings that must be equal for the figures of two models to compare."""
    return {
        "task": config.task, "data.dir": config.data.dir, "data.seq_len": config.data.seq_len,
        "train.batch_tokens": config.train.batch_tokens, "train.max_steps": config.train.max_steps,
    }  # fmt: skip


def seeds_of(study: Study, row: Row, order: Order) -> tuple[int, ...]:
    return tuple(sorted(set(order.seeds))) if order.seeds is not None else study.seeds.get(row.key, (0,))


def run_name(row: Row, seed: int) -> str:
    return f"{row.model}{'-' + row.variant if row.variant else ''}-s{seed}"


def runs_of(study: Study, order: Order) -> list[Run]:
    """The runs of a study, the most useful first: first seeds come before second seeds.

    Raises:
        UserError: a setting is wrong, or the study sets it itself.
    """
    _check_words(study, order)
    if study.timed:
        return [_timing(study, row, order) for row in study.rows]
    planned = [(row, seed) for row in study.rows for seed in seeds_of(study, row, order)]
    runs, choices = [], {model: _choice(study, model, order) for model in {row.model for row in study.rows}}
    for row, seed in sorted(planned, key=lambda item: item[1]):  # stable: the study's order within a seed
        config = _config(study, row, seed, order, order.tokens, run_name(row, seed), ())
        before = [run for run in runs if run.name == _before(study, row, order)]
        runs.append(Run(run_name(row, seed), row.model, row.variant, config, _measures(study, config),
                        choices[row.model], tuple(before)))  # fmt: skip
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
    for key in keys_of(order.words):
        if key in remedies:
            raise UserError(f"{key}: given, but this command sets it; leave it out and {remedies[key]}")


def _own_rates(study: Study) -> Grid | None:
    """Learning rates that the study's rule tries; None without a rule."""
    return RATES.get(study.size) if study.rated else None


def _choice(study: Study, model: str, order: Order) -> Choice | None:
    """Choice of a model's learning rate; None: the configured rate is used."""
    own = _own_rates(study)
    grid = Grid(tuple(order.rates)) if order.rates else own
    probe = cache(lambda rate: _probe(study, model, rate, order))
    return grid and Choice(grid, probe, named=bool(order.rates and own))


def _before(study: Study, row: Row, order: Order) -> str | None:
    """Name of the run from whose weights a row's runs start; None without such a run."""
    if not row.after:
        return None
    first = Row(row.model, row.after)
    return run_name(first, seeds_of(study, first, order)[0])


def _measures(study: Study, config: Config) -> tuple[Measure, ...]:
    """Measures of a study that apply to a run: those whose suite the run's task has, and "chunks"."""
    suites = TASKS.find(config.task).suites
    return tuple(m for m in study.measures if m.suite in suites or m.suite == "chunks")


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
    with torch.device("meta"):
        return sum(p.numel() for p in task_of(config).build_model().parameters())


def _timing(study: Study, row: Row, order: Order) -> Timing:
    name = f"speed-{row.key.replace('/', '-')}"
    config = _config(study, row, 0, order, None, name, ())
    words = (*row.settings, *order.words)
    own = study.own.get(row.model)
    file = str(Path(own).with_stem("{model}")) if own else f"{study.size}/{{model}}"
    return Timing(name, row.model, row.variant, config, file=file, words=words,
                  lengths=study.timed, tokens=max(study.timed))  # fmt: skip


def _probe(study: Study, model: str, rate: float, order: Order) -> Run:
    """Run of the unchanged model with a tenth of the tokens, at seed 0; the model's variants use the same rate."""
    name, row = f"{model}-lr{rate:g}", Row(model)
    whole = _config(study, row, 0, order, order.tokens, name, ())
    tokens = whole.train.max_steps * whole.train.batch_tokens // PROBE_SHARE
    return Run(name, model, "", _config(study, row, 0, order, tokens, name, (f"train.lr={rate!r}",)))


def _config(
    study: Study, row: Row, seed: int, order: Order, tokens: int | None, name: str, more: tuple[str, ...]
) -> Config:
    own = (f"run.dir={order.out / 'runs' / name}", f"run.seed={seed}")
    file = order.config or study.own.get(row.model) or f"{study.folder or study.size}/{row.model}"
    size = equal_size(file, row.model, order.words) if order.config else ()
    before = _before(study, row, order)
    start = (f"train.init_from={order.out / 'runs' / before}",) if before else ()
    words = [*size, *row.settings, *start, *order.words, *more, *own]
    config = load_config(file, words)
    if tokens is None:
        return config
    steps = max(1, tokens // config.train.batch_tokens)
    # A warm-up of more than a fifth of a short run would leave little of it.
    warmup = min(config.train.warmup_steps, steps // 5)
    return load_config(file, [*words, f"train.max_steps={steps}", f"train.warmup_steps={warmup}"])
