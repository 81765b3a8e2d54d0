"""Dotted paths of settings, and one-line messages about wrong settings."""

import difflib
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from titans_pt.config.plain import as_list, usual
from titans_pt.config.tree import Config


def known_paths(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted paths of all sections and settings, in the order of their declaration."""
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        inside = "." if isinstance(field.annotation, UnionType) else ".0."  # a section or null, or a list of sections
        for kind, dot in ((field.annotation, "."), *((item, inside) for item in get_args(field.annotation))):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                paths += known_paths(kind, prefix + name + dot)
    return paths


def one_line(error: ValidationError, prefix: str = "", section: type[BaseModel] = Config) -> str:
    """A message with the first error of a tree and the number of further errors.

    ``section`` is the type of the tree and ``prefix`` its path.
    """
    first, *others = _with_alternatives_joined(error.errors())
    path = prefix + ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    known = known_paths(section, prefix)
    # These places take sections of mixers, memory rules and tasks: a plain value can only be a mistyped setting.
    open_sections = ((), ("model",), ("model", "memory"))
    mistyped = first["type"] == "dict_type" and first["loc"][:-1] in open_sections and path not in known
    flat = "." in str(first["loc"][-1]) if first["loc"] else False
    if first["type"] == "extra_forbidden" or mistyped or (flat and first["type"] == "dict_type"):
        return unknown_key(path, first["input"], known, flat) + more
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        path = path.rstrip(".")
        return f"{path}.{message}{more}" if path else f"{message}{more}"
    given = _short(first["input"])
    allowed = _ALLOWED.get(first["type"], first["msg"].replace("\n", " "))
    if first["type"] == "list_type" and not isinstance(first["input"], dict | type(None)):
        allowed += f", such as {as_list(str(first['input']))}"
    return f"{path}: given {given}; allowed: {allowed}{more}"


_ALLOWED = {
    "dict_type": "a section, which has settings under it",
    "model_type": "a section, which has settings under it",
    "model_attributes_type": "a section, which has settings under it",
    "list_type": "a list",
    "bool_type": "true or false",
    "string_type": "a text",
}
"""pydantic's error name -> allowed values in plain words, for errors that pydantic describes in Python's terms."""


def _with_alternatives_joined(errors: list[ErrorDetails]) -> list[dict[str, Any]]:
    """Joins the errors of a value that fits no alternative of its setting (``"auto" | int``) into one error.

    pydantic gives one error per alternative, named at the end of the place: ('train', 'resume', "literal['auto']").
    """
    joined: dict[tuple, dict[str, Any]] = {}
    for error in errors:
        *place, last = error["loc"] or ("",)
        alternative = isinstance(last, str) and last.startswith(("literal[", "constrained-"))
        loc = tuple(place) if alternative else error["loc"]
        message = error["msg"].removeprefix("Input should be ")
        if alternative and loc in joined:
            message = f"{joined[loc]['msg']}, or {message}"
        joined[loc] = {**error, "loc": loc, "msg": message}
    return list(joined.values())


def _short(value: Any) -> str:
    text = repr(usual(value))
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(path: str, given: Any, known: list[str], flat: bool = False) -> str:
    """Message for a key that is not a setting.

    Args:
        flat: the key itself has dots, as on the command line.
    """
    if flat and (path in known or path.split(".")[0] in known):
        *sections, key = path.split(".")
        tree = f"{': {'.join([*sections, key])}: {_short(given)}{'}' * len(sections)}"
        return f"{path}: a key with dots is for the command line; write it in the file as {tree}"
    parent, _, leaf = path.rpartition(".")
    siblings = [p for p in known if p.rpartition(".")[0] == parent]
    near = (
        [p for p in known if p.rpartition(".")[2] == leaf]  # the right name in the wrong section
        or difflib.get_close_matches(path, siblings, n=1)
        or difflib.get_close_matches(path, known, n=1, cutoff=0.0)
    )
    if not near:
        return f"{path}: unknown key (given {_short(given)}); {parent or 'this section'} has no settings of its own"
    return f"{path}: unknown key (given {_short(given)}); nearest known key: {near[0]}"
