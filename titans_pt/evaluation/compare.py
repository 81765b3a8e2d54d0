"""Several runs side by side: a table of settings, losses and evaluations, or accuracy against length in one picture."""

import json
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_pt.config import NEEDLE_TASKS, BabilongConfig
from titans_pt.config.files import load_stored
from titans_pt.errors import UserError
from titans_pt.evaluation.runner import figures
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tools.markdown import markdown_table
from titans_pt.tools.plots import figure_format, plot_accuracy, plot_losses
from titans_pt.tools.sealed import read_sealed

_FIGURES = ("length", "mean", "low", "high", "n")
_SUITES = {"needle": NEEDLE_TASKS, "babilong": tuple(BabilongConfig().tasks)}
_PLACES = ("run.dir", "wandb", "evaluation")
"""Settings, or sections, that do not say what a run is. What an evaluation was made with is in its summary."""
_WIDEST = 40
"""Characters of a setting's value in a table."""


@dataclass
class _Run:
    """Content of the folder of a run, or of titans evaluate --out, by labels of rows."""

    training: dict[str, float | None] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    losses: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
    """(tokens, loss) in training, and in validation."""
    unit: str = ""


def compare(runs: Sequence[str | Path], path: Path, step: int | None = None) -> Path | None:
    """Print runs side by side, as tables in Markdown, and plot their losses against tokens.

    The tables have each run's progress and losses, the settings in which runs differ, those of their evaluations
    included, and the figures of its newest ``summary.json``. A section that only one run has, such as a mixer's, is no
    difference. Nothing is measured.

    Args:
        path: the picture.
        step: take the figures of this step; None: the newest of each run.

    Returns:
        ``path``, or None if no run has losses: there is no picture then.

    Raises:
        UserError: a folder is no run's, a run cannot be read, or matplotlib has no format for the picture's name.
    """
    figure_format(path)
    found = {name: _read(folder, step) for name, folder in _named(runs).items()}
    for title, rows in (
        ("training", _rows([run.training for run in found.values()])),
        ("settings that differ", _rows([run.settings for run in found.values()], alike=False)),
        ("evaluation", _rows([run.evaluation for run in found.values()])),
    ):
        if rows:
            print(markdown_table([title, *found], rows), end="\n\n")
    curves = {name: run.losses for name, run in found.items() if any(run.losses)}
    if not curves:
        return None
    units = {run.unit for run in found.values() if any(run.losses)}
    plot_losses(curves, path, units.pop() if len(units) == 1 else "units differ")
    print(path)
    return path


def compare_task(runs: Sequence[str | Path], task: str, path: Path, step: int | None = None) -> Path:
    """Plot accuracy against length, one line per run, from the results of ``titans evaluate``; nothing is measured.

    Args:
        task: a task of the needle or babilong suite.
        step: the checkpoint; None is the newest of each run that has been evaluated on the task.

    Raises:
        UserError: a run has no results of the task, or matplotlib has no format for the picture's name.
    """
    figure_format(path)
    lines, table = {}, []
    for name, folder in _named(runs).items():
        found, rows = _by_length(folder, task, step)
        lines[f"{name}, step {found}"] = rows
        table += [f"{folder.path}, step {found}:"]
        table += [
            f"  {row['length']:>11,}  {100 * row['mean']:6.2f} % "
            f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]  n {row['n']}"
            for row in rows
        ]
    plot_accuracy(lines, path, task)
    print("\n".join([*table, str(path)]))
    return path


def _named(runs: Sequence[str | Path]) -> dict[str, RunFolder]:
    """The folders by the names of their last parts, or by the words given where these are not distinct."""
    words = list(dict.fromkeys(map(str, runs)))
    names = [Path(word).resolve().name for word in words]
    return {
        name if names.count(name) == 1 else word: RunFolder(word) for name, word in zip(names, words, strict=True)
    }  # fmt: skip


def _read(folder: RunFolder, step: int | None) -> _Run:
    found = _Run()
    path, summary = next(_summaries(folder, step), (None, dict[str, Any]()))
    for suite, part in summary.items():
        if isinstance(part, dict):
            found.settings |= _leaves({"evaluation": {suite: part.get("settings", {})}})
    if path:
        try:
            found.evaluation = {"step": summary["step"]} | figures(summary)
        except (LookupError, TypeError) as error:
            raise _damaged(path, repr(error), folder) from None
    if not folder.config.is_file():
        if path is None:
            raise UserError(
                f"{folder.path}: neither a run nor a folder of titans evaluate --out"
                f"{'' if step is None else f' with results of step {step}'}; name the folder that run.dir named"
            )
        return found
    config = load_stored(folder.config)
    found.settings |= {
        key: value for key, value in _leaves(config.model_dump(mode="json")).items()
        if key not in _PLACES and key.partition(".")[0] not in _PLACES
    }  # fmt: skip
    found.unit = task_of(config).unit
    records = [record for record in read_metrics(folder.metrics) if step is None or record["step"] <= step]
    train, validation = ([row for row in records if row["kind"] == kind] for kind in ("train", "validation"))
    tokens = config.train.batch_tokens
    found.losses = _curve(train, "loss", tokens), _curve(validation, "validation_loss", tokens)
    last = max((row["step"] for row in train), default=0)
    found.training = {
        "parameters": _parameters(folder),
        "steps": last,
        "tokens": last * tokens,
        "tokens per second, median": statistics.median(row["tokens_per_second"] for row in train) if train else None,
        f"training loss ({found.unit})": found.losses[0][-1][1] if found.losses[0] else None,
        f"validation loss ({found.unit})": found.losses[1][-1][1] if found.losses[1] else None,
        f"lowest validation loss ({found.unit})": min((loss for _, loss in found.losses[1]), default=None),
    }
    if validation:
        others = {key: value for key, value in validation[-1].items() if key.startswith("validation_")}
        others.pop("validation_loss")
        found.training |= {key.replace("_", " "): value for key, value in others.items()}
    return found


def _curve(records: list[dict], key: str, tokens: int) -> list[tuple[int, float]]:
    """(tokens, loss) of the records whose loss is finite; ``tokens`` a step."""
    return [(record["step"] * tokens, record[key]) for record in records if record[key] is not None]


def _parameters(folder: RunFolder) -> int | None:
    """Parameters of the newest checkpoint, by the heads of its files; None where there is none to be read."""
    try:
        with checkpoints.Tensors(checkpoints.list_checkpoints(folder.checkpoints)[-1]) as tensors:
            return sum(map(math.prod, tensors.shapes().values()))
    except Exception:  # damaged, or just deleted by its training: safetensors has errors of its own
        return None


def _leaves(tree: dict, prefix: str = "") -> dict[str, Any]:
    """The values of a settings tree by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _rows(columns: Sequence[dict[str, Any]], alike: bool = True) -> list[list[str]]:
    """A row for each key of any column; without ``alike`` only where columns that have the key differ."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [
        [key, *(_shown(column.get(key)) for column in columns)] for key in keys
        if alike or len({json.dumps(column[key]) for column in columns if key in column}) > 1
    ]  # fmt: skip


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        text = str(value).lower() if isinstance(value, bool) else value
    elif isinstance(value, int):
        return f"{value:,}"
    elif isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    else:
        text = json.dumps(value)
    text = " ".join(text.replace("|", "\\|").split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _summaries(folder: RunFolder, step: int | None) -> Iterator[tuple[Path, dict]]:
    """Yields (file, content) of the run's summaries, the newest first.

    Raises:
        UserError: a file is damaged.
    """
    pattern = "step-*" if step is None else f"step-{step:08d}"
    for path in sorted(folder.evaluation.glob(f"{pattern}/summary.json"), reverse=True):
        summary = read_sealed(path, f"make it again with: {_again(folder)}")
        if summary is not None:
            if not isinstance(summary.get("step"), int):
                raise _damaged(path, "it has no step", folder)
            yield path, summary


def _by_length(folder: RunFolder, task: str, step: int | None) -> tuple[int, list[dict]]:
    """(step, rows by length) of the newest summary that has the task."""
    for path, summary in _summaries(folder, step):
        try:
            for suite in _SUITES:
                if task in summary.get(suite, {}).get("tasks", {}):
                    rows = summary[suite]["tasks"][task]["by_length"]
                    if missing := [key for row in rows for key in _FIGURES if key not in row]:
                        raise ValueError(f"{missing[0]!r} is missing")
                    return summary["step"], rows
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _damaged(path, str(error), folder) from None
    owner = next((name for name, tasks in _SUITES.items() if task in tasks), None)
    if owner is None:
        names = ", ".join(name for tasks in _SUITES.values() for name in tasks)
        raise UserError(f"--task: given {task!r}; allowed: {names}")
    if folder.config.is_file():
        run = task_of(load_stored(folder.config))
        if owner not in run.suites:
            raise UserError(f"{folder.path}: a run of task={run.config.task} has no {owner} suite, only "
                            f"{', '.join(run.suites)}; leave --task out")  # fmt: skip
    asked = f"--suite {owner} {shlex.quote(f'evaluation.{owner}.tasks=[{task}]')}"
    asked += f" --checkpoint {step}" if step is not None else ""
    raise UserError(f"{folder.path}: holds no results of {task}; make them with: {_again(folder)} {asked}")


def _damaged(path: Path, why: str, folder: RunFolder) -> UserError:
    return UserError(f"{path}: damaged ({why}); make it again with: {_again(folder)}")


def _again(folder: RunFolder) -> str:
    """The command that fills ``folder``, which is a run's folder or the folder of --out."""
    path = shlex.quote(str(folder.path))
    return f"titans evaluate {path}" if folder.config.is_file() else f"titans evaluate RUN --out {path}"
