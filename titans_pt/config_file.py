"""Settings from YAML files: inheritance, ``key=value`` overrides, and errors of one line that name the path."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from titans_pt.config import Config, config_hash, with_todays_names
from titans_pt.config_check import checked
from titans_pt.config_history import as_stored
from titans_pt.config_words import one_line
from titans_pt.errors import UserError
from titans_pt.tools.files import read_text

CONFIGS = Path(__file__).parent / "configs"
"""The configs that come with the package: configs/ of the repository."""


def load_config(name: str | Path, overrides: list[str] = (), model: bool = True) -> Config:
    """Reads a YAML file with its ancestors, applies ``key.path=value`` overrides, validates.

    ``name`` is a path, or one of the configs that come with the package (:func:`find_config`). ``inherit: FILE`` or
    ``inherit: [FILE, ...]`` at the top of a file names files relative to it, or again configs of the package; later
    ones and the file itself win, key by key; lists are replaced whole. Override values are YAML.

    Args:
        model: False skips the checks of mixers and task, which preparing data does not need: they take two seconds to
            import torch.

    Raises:
        UserError: one line that names the path, what was given and what is allowed.
    """
    return validated(_merged(_layers(find_config(name), ())), overrides, model)


def load_stored(path: Path, overrides: list[str] = ()) -> Config:
    """As :func:`load_config`, of a file that titans_pt.config.resolved_yaml wrote, if need be in an earlier version:
    what it lacks is what that version did."""
    return validated(as_stored(_merged(_layers(Path(path), ()))), overrides, model=True)


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
        key, _, value = item.partition("=")
        tree = with_todays_names(_nest(key.split("."), _parse(value, item)))
        origins |= dict.fromkeys(_leaves(tree), "command line")
    lines = [f"# the settings of {_shown(path)} and where each came from; sha256: {config_hash(config)}"]
    _explain(config.model_dump(mode="json"), (), origins, lines)
    return "\n".join(lines) + "\n"


def _explain(tree: dict, above: tuple[str, ...], origins: dict[tuple[str, ...], str], lines: list[str]):
    for key, value in tree.items():
        path, indent = (*above, key), "  " * len(above)
        if isinstance(value, dict) and value and not any(path[:n] in origins for n in range(1, len(path) + 1)):
            lines.append(f"{indent}{key}:")
            _explain(value, path, origins, lines)
            continue
        first, *rest = yaml.safe_dump({key: value}, sort_keys=False, width=10**6).splitlines()
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
    """The settings of a tree with ``key.path=value`` words over it. Raises UserError as :func:`load_config`."""
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep or not key:
            raise UserError(f"override {item!r}: write it as key.path=value, e.g. train.max_steps=10")
        _merge(tree, with_todays_names(_nest(key.split("."), _parse(value, f"override {item!r}"))))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(one_line(error)) from None
    return checked(config) if model else config


def find_config(name: str | Path, folder: Path = Path()) -> Path:
    """The file that ``name`` stands for: an existing path (relative to ``folder``), or else a config of the package.

    ``170m/mac``, ``170m/mac.yaml`` and ``configs/170m/mac.yaml`` all name the same one.

    Raises:
        UserError: neither exists; the message suggests the nearest names.
    """
    path = folder / name
    if path.exists() and not path.is_dir():
        return path
    packaged = {file.relative_to(CONFIGS).with_suffix("").as_posix(): file for file in sorted(CONFIGS.rglob("*.yaml"))}
    asked = Path(name).as_posix().removeprefix("configs/").removesuffix(".yaml")
    if asked in packaged:
        return packaged[asked]
    near = (
        [known for known in packaged if Path(known).name == asked]  # the right name without its folder
        or difflib.get_close_matches(asked, packaged, n=3, cutoff=0.5)
        or dict.fromkeys(f"{known.partition('/')[0]}/*" if "/" in known else known for known in packaged)
    )
    problem = "is a folder" if path.is_dir() else "does not exist"
    raise UserError(
        f"config {path}: {problem}; name a YAML file, or a config that comes with titans-pt: {', '.join(near)}"
    )


class _Loader(yaml.SafeLoader):
    """Reads 3e-4 as a number; YAML 1.1 takes it for a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _layers(path: Path, seen: tuple[Path, ...]) -> Iterator[tuple[Path, dict]]:
    """(file, its own settings) of all that a file inherits and of itself, which win in this order."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path}: inherits from itself through {' -> '.join(p.name for p in seen)}")
    tree = _parse(read_text(path, "config"), str(path)) or {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must hold key: value pairs, holds a {type(tree).__name__}")
    parents = tree.pop("inherit", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: inherit: given {parents!r}; allowed: a file, or a list of files")
    for parent in parents:
        yield from _layers(find_config(parent, path.parent), (*seen, path))
    yield path, with_todays_names(tree)


def _merged(layers: Iterable[tuple[Path, dict]]) -> dict:
    merged: dict = {}
    for _, tree in layers:
        _merge(merged, tree)
    return merged


def _nest(keys: list[str], value: Any) -> dict:
    return {keys[0]: _nest(keys[1:], value) if len(keys) > 1 else value}


def _merge(base: dict, top: dict) -> dict:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    return base
