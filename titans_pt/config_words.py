"""Settings by their dotted paths, and what is wrong with one in one line."""

import difflib
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from titans_pt.config import Config


def known_paths(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """The dotted path of every section and setting, in the order of their declaration."""
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        inside = "." if isinstance(field.annotation, UnionType) else ".0."  # a section or null, or a list of sections
        for kind, dot in ((field.annotation, "."), *((item, inside) for item in get_args(field.annotation))):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                paths += known_paths(kind, prefix + name + dot)
    return paths


def one_line(error: ValidationError, prefix: str = "", section: type[BaseModel] = Config) -> str:
    """The first error of a tree (of a ``section`` whose path is ``prefix``) and how many more there are."""
    first, *others = _with_alternatives_joined(error.errors())
    path = prefix + ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    known = known_paths(section, prefix)
    # Where sections of mixers and tasks are allowed, a single value can only be a mistyped name.
    mistyped = first["type"] == "dict_type" and first["loc"][:-1] in ((), ("model",)) and path not in known
    if first["type"] == "extra_forbidden" or mistyped:
        return unknown_key(path, first["input"], known) + more
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        path = path.rstrip(".")
        return f"{path}.{message}{more}" if path else f"{message}{more}"
    allowed = first["msg"].replace("\n", " ")
    return f"{path}: given {_short(first['input'])}; allowed: {allowed}{more}"


def _with_alternatives_joined(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors in which a value that fits no alternative of its setting (``"auto" | int``) is one error, not several.

    pydantic names the alternative at the end of the place: ('train', 'resume', "literal['auto']").
    """
    joined: dict[tuple, dict[str, Any]] = {}
    for error in errors:
        *place, last = error["loc"] or ("",)
        alternative = isinstance(last, str) and last.startswith(("literal[", "constrained-"))
        loc = tuple(place) if alternative else error["loc"]
        message = error["msg"].removeprefix("Input should be ")
        if alternative and loc in joined:
            message = f"{joined[loc]['msg']}, or {message}"
        joined[loc] = error | {"loc": loc, "msg": message}
    return list(joined.values())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(path: str, given: Any, known: list[str]) -> str:
    parent, _, leaf = path.rpartition(".")
    siblings = [p for p in known if p.rpartition(".")[0] == parent]
    near = (
        [p for p in known if p.rpartition(".")[2] == leaf]  # the right name in the wrong section
        or difflib.get_close_matches(path, siblings, n=1)
        or difflib.get_close_matches(path, known, n=1, cutoff=0.0)
    )
    return f"{path}: unknown key (given {_short(given)}); nearest known key: {near[0]}"
