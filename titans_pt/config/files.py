"""Settings from YAML files: inheritance, ``key=value`` overrides, and one-line errors that name the path."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titans_pt.config.checks import checked
from titans_pt.config.history import as_stored, without_gone
from titans_pt.config.model import with_todays_names
from titans_pt.config.names import CONFIGS, find_config, is_of_a_run
from titans_pt.config.place import in_its_place
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

    ``name`` is a path, or a config that comes with the package (:func:`find_config`). ``inherit: FILE`` or
    ``inherit: [FILE, ...]`` at the top of a file names files relative to it, or configs of the package. Later files
    override earlier ones key by key, and the file itself overrides all; lists are replaced whole.

    A value is read by the type of its setting (values.py). The config.yaml of a run's folder refers to the run in that
    folder, even if the folder was moved (config/place.py).

    Args:
        model: False skips the checks of mixers and task. Preparing data does not need them, and they take two seconds
            to import torch.

    Raises:
        UserError: one line that names the path, the given value and the allowed values.
    """
    return validated(_merged(find_config(name)), overrides, model)


def load_stored(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Loads the config.yaml of a run's folder, like :func:`load_config`.

    If an earlier version wrote the file, settings that it lacks get the values for that version's behaviour.
    """
    return validated(as_stored(_merged(Path(path))), overrides, model=True)


def explained(name: str | Path, overrides: Sequence[str] = ()) -> str:
    """The whole settings tree as YAML, with the origin of each value in a comment.

    The origin is a file, "command line" or "default". Loading the text gives the same settings.

    Raises:
        UserError: as for :func:`load_config`.
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
    """The tree of a single ``key.path=value`` override."""
    return with_todays_names(_nest(*parse_override(override)))


def keys_of(overrides: Sequence[str]) -> list[str]:
    """Dotted keys that ``key.path=value`` overrides set; a section given whole contributes all keys inside it.

    Raises:
        UserError: a word is not an override.
    """
    trees = (_tree_of(item) for item in overrides)
    return [".".join(path) for tree in trees for path in _leaves(tree)]


def check_free(overrides: Sequence[str], remedies: Mapping[str, str]):
    """Refuses overrides of settings that a command sets itself, and which would therefore have no effect.

    Args:
        remedies: key of each such setting -> what to do in place of setting it, for the message.

    Raises:
        UserError: an override sets one of them.
    """
    for key in keys_of(overrides):
        if key in remedies:
            raise UserError(f"{key}: given, but this command sets it; leave it out and {remedies[key]}")


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
    """Paths of all leaves of a tree: plain values and empty sections."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield *above, key


def _shown(path: Path) -> str:
    """A path as users write it: configs/NAME for a packaged config, relative if below the working directory."""
    path = path.resolve()
    for root, before in ((CONFIGS.resolve(), "configs/"), (Path.cwd(), "")):
        if path.is_relative_to(root):
            return before + path.relative_to(root).as_posix()
    return str(path)


def validated(tree: dict, overrides: Sequence[str] = (), model: bool = True) -> Config:
    """Validates a tree with ``key.path=value`` overrides applied. Raises UserError like :func:`load_config`.

    Args:
        tree: its values already have the types of their settings.
    """
    for item in overrides:
        tree = _merge(tree, typed(_tree_of(item), Config))
    tree = without_gone(tree)
    try:
        config = Config.model_validate(tree if model else usual(tree))
    except ValidationError as error:
        raise UserError(one_line(error)) from None
    return checked(config) if model else config


def _layers(path: Path, seen: tuple[Path, ...]) -> Iterator[tuple[Path, dict]]:
    """(file, its own typed settings) for a file's ancestors, then the file itself; later ones override earlier."""
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
    """Settings of a file merged with its ancestors."""
    merged: dict = {}
    for _, tree in _layers(path, ()):
        merged = _merge(merged, tree)
    return in_its_place(merged, path.parent) if is_of_a_run(path) else merged


def _nest(keys: list[str], value: Any) -> dict:
    return {keys[0]: _nest(keys[1:], value) if len(keys) > 1 else value}


def _merge(base: dict, top: dict) -> dict:
    """A new tree: ``base`` overridden by ``top``."""
    both = {key: _merge(base[key], value) for key, value in top.items()
            if isinstance(value, dict) and isinstance(base.get(key), dict)}  # fmt: skip
    return base | top | both
