"""Settings from YAML files: inheritance, ``key=value`` overrides, and errors of one line that name the path."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titans_pt.config.checks import checked
from titans_pt.config.history import as_stored
from titans_pt.config.model import with_todays_names
from titans_pt.config.names import CONFIGS, find_config
from titans_pt.config.place import in_its_place, is_of_a_run
from titans_pt.config.plain import usual
from titans_pt.config.tree import Config, config_hash
from titans_pt.config.values import expanded, typed
from titans_pt.config.words import one_line
from titans_pt.config.yaml import parse_override, parse_yaml, write_yaml
from titans_pt.errors import UserError
from titans_pt.tools.files import read_text

__all__ = ["CONFIGS", "explained", "find_config", "load_config", "load_stored", "validated"]


def load_config(name: str | Path, overrides: Sequence[str] = (), model: bool = True) -> Config:
    """Reads a YAML file with its ancestors, applies ``key.path=value`` overrides, validates.

    ``name`` is a path, or one of the configs that come with the package (:func:`find_config`). ``inherit: FILE`` or
    ``inherit: [FILE, ...]`` at the top of a file names files relative to it, or again configs of the package; later
    ones and the file itself win, key by key; lists are replaced whole. A value is read as its setting wants it
    (values.py). The config.yaml of a run's folder means that run, wherever it now lies (config/place.py).

    Args:
        model: False skips the checks of mixers and task, which preparing data does not need: they take two seconds to
            import torch.

    Raises:
        UserError: one line that names the path, what was given and what is allowed.
    """
    return validated(_merged(find_config(name)), overrides, model)


def load_stored(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Loads the config.yaml of a run's folder, as :func:`load_config`. An earlier version may have written it: settings
    that it lacks get the values that stand for that version's behaviour."""
    return validated(as_stored(_merged(Path(path))), overrides, model=True)


def explained(name: str | Path, overrides: Sequence[str] = ()) -> str:
    """The whole tree of settings as YAML, each value with the file that it came from in a comment, or "command line",
    or "default". Loading the text gives the same settings.

    Raises:
        UserError: as :func:`load_config`.
    """
    path = find_config(name)
    origins: dict[tuple[str, ...], str] = {}
    for file, tree in _layers(path, ()):
        origins |= dict.fromkeys(_leaves(tree), _shown(file))
    config = load_config(name, overrides)
    for item in overrides:
        tree = _tree_of(item)
        origins |= dict.fromkeys(_leaves(tree), "command line")
    lines = [f"# the settings of {_shown(path)} and where each came from; sha256: {config_hash(config)}"]
    _explain(config.model_dump(mode="json"), (), origins, lines)
    return "\n".join(lines) + "\n"


def _tree_of(override: str) -> dict:
    """The tree of one ``key.path=value`` word."""
    return with_todays_names(_nest(*parse_override(override)))


def keys_of(overrides: Sequence[str]) -> list[str]:
    """Dotted keys that ``key.path=value`` words set, those inside of a section given whole too.

    Raises:
        UserError: a word that is no override.
    """
    trees = (_tree_of(item) for item in overrides)
    return [".".join(path) for tree in trees for path in _leaves(tree)]


def _explain(tree: dict, above: tuple[str, ...], origins: dict[tuple[str, ...], str], lines: list[str]):
    for key, value in tree.items():
        path, indent = (*above, key), "  " * len(above)
        if isinstance(value, dict) and value and not any(path[:n] in origins for n in range(1, len(path) + 1)):
            lines.append(f"{indent}{key}:")
            _explain(value, path, origins, lines)
            continue
        first, *rest = write_yaml({key: value}).splitlines()
        origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "default")
        lines += [f"{indent}{first:<{40 - len(indent)}}  # {origin}", *(indent + line for line in rest)]


def _leaves(tree: dict, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of everything in a tree that is no section with something in it."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield *above, key


def _shown(path: Path) -> str:
    """A path as users write it: configs/NAME for one of the package, relative below the working directory."""
    path = path.resolve()
    for root, before in ((CONFIGS.resolve(), "configs/"), (Path.cwd(), "")):
        if path.is_relative_to(root):
            return before + path.relative_to(root).as_posix()
    return str(path)


def validated(tree: dict, overrides: Sequence[str] = (), model: bool = True) -> Config:
    """The settings of a tree with ``key.path=value`` words over it. Raises UserError as :func:`load_config`.

    Args:
        tree: its values are of the types of their settings.
    """
    for item in overrides:
        tree = _merge(tree, typed(_tree_of(item), Config))
    try:
        config = Config.model_validate(tree if model else usual(tree))
    except ValidationError as error:
        raise UserError(one_line(error)) from None
    return checked(config) if model else config


def _layers(path: Path, seen: tuple[Path, ...]) -> Iterator[tuple[Path, dict]]:
    """(file, its own settings, by their types) of all that a file inherits and of itself, which win in this order."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path}: inherits from itself through {' -> '.join(p.name for p in seen)}")
    tree = parse_yaml(read_text(path, "config"), str(path))
    tree = {} if usual(tree) is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold key: value pairs, holds a {type(usual(tree)).__name__}")
    parents = usual(tree.pop("inherit", []))
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: inherit: given {parents!r}; allowed: a file, or a list of files")
    for parent in parents:
        yield from _layers(find_config(expanded(parent, f"{path}: inherit"), path.parent), (*seen, path))
    yield path, typed(with_todays_names(tree), Config, expand=not is_of_a_run(path))


def _merged(path: Path) -> dict:
    """Settings of a file and its ancestors."""
    merged: dict = {}
    for _, tree in _layers(path, ()):
        merged = _merge(merged, tree)
    return in_its_place(merged, path.parent) if is_of_a_run(path) else merged


def _nest(keys: list[str], value: Any) -> dict:
    return {keys[0]: _nest(keys[1:], value) if len(keys) > 1 else value}


def _merge(base: dict, top: dict) -> dict:
    """A new tree: ``base`` with what ``top`` says over it."""
    both = {key: _merge(base[key], value) for key, value in top.items()
            if isinstance(value, dict) and isinstance(base.get(key), dict)}  # fmt: skip
    return base | top | both
