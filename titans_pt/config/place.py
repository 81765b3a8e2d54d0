"""Paths in a run's settings, corrected for the current place of its folder.

A relative path in settings counts from the folder in which the run was started. But a run's own config.yaml may be read
from elsewhere, and a run's folder may have been moved.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titans_pt.config.checks import import_modules
from titans_pt.config.names import ABOUT, STARTED_IN
from titans_pt.config.tree import Config, RunConfig
from titans_pt.config.values import mapped
from titans_pt.errors import UserError


def in_its_place(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a run, adapted to the current place of its folder.

    run.dir becomes this folder. Other relative paths count from the folder where the run was started, if they exist
    there.

    Args:
        tree: content of a run's config.yaml.
        folder: the folder that holds it.
    """
    run = tree.get("run")
    was = run.get("dir") if isinstance(run, dict) else None
    if not isinstance(was, str):
        return tree  # no run wrote this file
    bases = [base for base in _bases(folder, was) if base != Path.cwd()]

    def leaf(value: Any, kinds: dict[Any, bool], path: str) -> Any:
        if path == "run.dir":
            return value if _same(Path(value), folder) else str(folder if folder.name else folder.resolve())
        if not isinstance(value, str) or not kinds.get(str) or Path(value).is_absolute():
            return value
        return next((str(base / value) for base in bases if _is_there(base / value)), value)

    found = mapped(tree, Config, leaf)
    return found | {name: mapped(tree[name], kind, leaf, name) for name, kind in _of_tasks(tree)}


def _of_tasks(tree: dict[str, Any]) -> Iterator[tuple[str, type]]:
    """(name, settings class) of the task sections in ``tree``, which Config itself does not know."""
    names = [key for key, value in tree.items() if isinstance(value, dict) and key not in Config.model_fields]
    if not names:
        return
    from titans_pt.tasks import TASKS  # not at the top: it imports torch

    with contextlib.suppress(UserError, ValidationError):  # wrong settings are reported when they are checked
        import_modules(RunConfig.model_validate(tree.get("run", {})).imports)
    for name in names:
        with contextlib.suppress(UserError):
            yield name, TASKS.find(name).Settings


def _bases(folder: Path, was: str) -> Iterator[Path]:
    """Folders in which the run may have been started, most likely first."""
    folder = Path(os.path.abspath(folder))
    try:
        noted = Path(json.loads((folder / ABOUT).read_text(encoding="utf-8"))[STARTED_IN])
    except (OSError, ValueError, KeyError, TypeError):
        noted = None
    if noted and _same(noted / was, folder):
        yield noted
    parts = Path(was).parts
    if not Path(was).is_absolute() and ".." not in parts and len(parts) < len(folder.parts):
        yield folder.parents[len(parts) - 1] if parts else folder  # assumes that only the folder's names changed
    if noted:
        yield noted


def _same(a: Path, b: Path) -> bool:
    # os.path.exists is False in a folder that may not be entered; Path.exists raises there before Python 3.14.
    return os.path.exists(a) and os.path.exists(b) and a.samefile(b)


def _is_there(path: Path) -> bool:
    """Whether a path exists, or is the common prefix of token files (kind=indexed)."""
    return os.path.exists(path) or os.path.exists(f"{path}.idx")
