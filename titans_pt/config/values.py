"""Conversion of a tree's values to the types of their settings.

Words without quotes are converted to the setting's type, and ``~`` and ``$VARIABLES`` in paths are expanded.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from titans_pt.config.fields import PATH
from titans_pt.config.plain import Unquoted
from titans_pt.errors import UserError


def typed(value: Any, kind: Any, path: str = "", expand: bool = True) -> Any:
    """Converts a tree from YAML to the types of its settings (:meth:`Unquoted.read`) and expands paths.

    What stands under keys that are not settings of ``kind`` (sections of mixers and tasks, mistyped names) is left
    unchanged.

    Args:
        kind: a section, or the annotation of a field.
        path: the place of the value in the tree, for messages.
        expand: False for settings that a run has stored; their paths were expanded when the run was started.

    Raises:
        UserError: a path has a variable that is not set.
    """

    def leaf(word: Any, kinds: dict[Any, bool], place: str) -> Any:
        word = word.read(set(kinds)) if isinstance(word, Unquoted) else word
        if word is None and NoneType not in kinds and any(kind is dict or _is_section(kind) for kind in kinds):
            return {}  # a section's key with nothing, or only comments, under it
        return expanded(word, place) if expand and isinstance(word, str) and kinds.get(str) else word

    return mapped(value, kind, leaf, path)


def mapped(value: Any, kind: Any, leaf: Callable[[Any, dict[Any, bool], str], Any], path: str = "") -> Any:
    """A copy of a tree with ``leaf`` applied to each value whose setting is known.

    Args:
        leaf: called with the value, a dict (allowed type -> whether it is a path), and the value's dotted path.
    """
    kinds = dict(_alternatives(kind))
    if isinstance(value, dict):
        for section in kinds:
            if _is_section(section):
                return {key: _field(section, key, item, leaf, path) for key, item in value.items()}
            if get_origin(section) is dict:
                of_item = get_args(section)[1]
                return {key: mapped(item, of_item, leaf, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        for each in kinds:
            if get_origin(each) is list:
                return [mapped(item, get_args(each)[0], leaf, f"{path}.{n}") for n, item in enumerate(value)]
    return value if isinstance(value, dict | list) else leaf(value, kinds, path)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _field(section: type[BaseModel], key: str, value: Any, leaf: Callable, path: str) -> Any:
    kind: Any
    if field := section.model_fields.get(key):
        kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    elif section.model_config.get("extra") == "allow":
        kind = dict  # the section of a mixer, memory rule or task, which converts what is in it
    else:
        return value
    return mapped(value, kind, leaf, f"{path}.{key}".lstrip("."))


def _alternatives(kind: Any, path: bool = False) -> Iterator[tuple[Any, bool]]:
    """(type, whether it is a path) for every alternative of an annotation."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *metadata = get_args(kind)
        yield from _alternatives(inner, path or PATH in metadata)
    elif origin in (Union, UnionType):
        for each in get_args(kind):
            yield from _alternatives(each, path)
    elif origin is Literal:
        yield from ((type(each), False) for each in get_args(kind))
    else:
        yield kind, path


_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def expanded(text: str, where: str) -> str:
    """A path with ``~`` (``~USER``), ``$NAME`` and ``${NAME}`` expanded; a URL is not changed.

    "./", "//" and a final "/" are removed, so that each file has a single spelling.

    Args:
        where: the setting or option that gives the path, for the message.

    Raises:
        UserError: a variable is not set, or a user has no home.
    """

    def value(match: re.Match) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            if os.path.lexists(text):  # a file may have such a name
                return match[0]
            raise UserError(f"{where}: given {text!r}, but the environment variable {name} is not set; set it, or "
                            "write the path itself")  # fmt: skip
        return os.environ[name]

    if not text or "://" in text:
        return text
    found = _VARIABLE.sub(value, text)
    if found.startswith("~"):
        home, _, rest = found.partition("/")
        if os.path.expanduser(home) != home:
            found = os.path.expanduser(found)
        elif not os.path.exists(home):  # a file may have such a name
            raise UserError(f"{where}: given {text!r}, but {home} has no home folder here; write the whole path")
    return str(Path(found))
