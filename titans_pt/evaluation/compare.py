"""Several runs in one picture."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from titans_pt.config import NEEDLE_TASKS, BabilongConfig
from titans_pt.errors import UserError
from titans_pt.runs.folder import RunFolder
from titans_pt.tools.plots import figure_format, plot_accuracy
from titans_pt.tools.sealed import unseal

_FIGURES = ("length", "mean", "low", "high", "n")


def compare(runs: Sequence[str | Path], task: str, path: Path, step: int | None = None) -> Path:
    """Plot accuracy against length, one line per run, from the results of ``titans evaluate``; nothing is measured.

    Args:
        task: a task of the needle or babilong suite.
        step: the checkpoint; None is the newest of each run that has been evaluated on the task.

    Raises:
        UserError: a run has no results of the task, or matplotlib has no format for the picture's name.
    """
    figure_format(path)
    lines, table = {}, []
    for run in dict.fromkeys(map(str, runs)):
        found, rows = _rows(RunFolder(run), task, step)
        name = f"{Path(run).resolve().name}, step {found}"
        lines[name if name not in lines else f"{run}, step {found}"] = rows
        table += [f"{run}, step {found}:"]
        table += [
            f"  {row['length']:>11,}  {100 * row['mean']:6.2f} % "
            f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]  n {row['n']}"
            for row in rows
        ]
    plot_accuracy(lines, path, task)
    print("\n".join([*table, str(path)]))
    return path


def _rows(folder: RunFolder, task: str, step: int | None) -> tuple[int, list[dict]]:
    """(step, rows by length) of the newest summary that has the task."""
    pattern = "step-*" if step is None else f"step-{step:08d}"
    for path in sorted(folder.evaluation.glob(f"{pattern}/summary.json"), reverse=True):
        try:
            summary = unseal(path.read_bytes())
            for suite in ("needle", "babilong"):
                if task in summary.get(suite, {}).get("tasks", {}):
                    rows = summary[suite]["tasks"][task]["by_length"]
                    if missing := [key for row in rows for key in _FIGURES if key not in row]:
                        raise ValueError(f"{missing[0]!r} is missing")
                    return summary["step"], rows
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error}); make it again with: {_again(folder)}") from None
    owner = next((name for name, tasks in _SUITES.items() if task in tasks), None)
    if owner is None:
        names = ", ".join(name for tasks in _SUITES.values() for name in tasks)
        raise UserError(f"--task: given {task!r}; allowed: {names}")
    asked = f"--suite {owner} {shlex.quote(f'evaluation.{owner}.tasks=[{task}]')}"
    asked += f" --checkpoint {step}" if step is not None else ""
    raise UserError(f"{folder.path}: holds no results of {task}; make them with: {_again(folder)} {asked}")


_SUITES = {"needle": NEEDLE_TASKS, "babilong": tuple(BabilongConfig().tasks)}


def _again(folder: RunFolder) -> str:
    """The command that fills ``folder``, which is a run's folder or the folder of --out."""
    path = shlex.quote(str(folder.path))
    return f"titans evaluate {path}" if folder.config.is_file() else f"titans evaluate RUN --out {path}"
