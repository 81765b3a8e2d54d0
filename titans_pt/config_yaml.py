"""YAML as settings are written in: text to a tree and back, and what a word without quotes means where it stands.

The numbers, booleans and nulls are YAML 1.2's (core schema); PyYAML's own are those of YAML 1.1, where ``no`` is false,
``2026-01-05`` a date, ``1:30`` the number 90 and ``1e6`` a string. Which of them a word is depends on the setting, too:
a text stays what was typed (:meth:`Plain.read`).
"""

import re
import shlex
from decimal import Decimal
from typing import Any

import yaml
from pydantic import BaseModel

from titans_pt.errors import UserError

MOST_VALUES = 100_000
"""A file has no more values than this once its aliases are followed; aliases of aliases grow exponentially."""

_NOT_YAML = "not valid YAML"
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
"""Booleans of YAML 1.1 alone, in small letters; they are read where a boolean is wanted, since older files have them.
"""


class Plain(str):
    """A word (scalar) that was written without quotes."""

    def read(self, kinds: set[type]) -> Any:
        """The word as the first of null, boolean, number and text that is among ``kinds``, which a setting may be.

        A whole number may be written as 1e6. A word that is none of them is read as YAML reads it, for the message.
        Null is never a text: a setting that cannot be null says so.
        """
        if self in _NULLS:
            return None
        if bool in kinds and self.lower() in _SWITCHES | _BOOLEANS:
            return (_SWITCHES | _BOOLEANS)[self.lower()]
        if kinds & {int, float}:
            number = _number(self)
            if isinstance(number, float) and float not in kinds and number.is_integer():
                number = int(Decimal(self.replace("_", "")))  # exact: 1e23 is not the float 1e23
            if number is not None:
                return number
        return str(self) if str in kinds else self.usual

    @property
    def usual(self) -> Any:
        """What YAML 1.2 makes of it (and of digits with underscores between, as YAML 1.1 does)."""
        if self in _NULLS:
            return None
        if self in _BOOLEANS:
            return _BOOLEANS[self]
        number = _number(self)
        return str(self) if number is None else number


def _number(text: str) -> int | float | None:
    if _INT.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) > 300:
            return None  # more than any float; Python refuses more than 4,300 digits
        return int(digits, 0 if digits[1:2] in ("o", "x") else 10)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if special := _SPECIAL.fullmatch(text):
        return float(special[1] + special[2])
    return None


def usual(value: Any) -> Any:
    """A tree in which every :class:`Plain` is what YAML makes of it, wherever it stands."""
    if isinstance(value, Plain):
        return value.usual
    if isinstance(value, dict):
        return {key: usual(item) for key, item in value.items()}
    return [usual(item) for item in value] if isinstance(value, list) else value


def parse_yaml(text: str, where: str) -> Any:
    """dicts, lists, and for words :class:`Plain` or, where they have quotes, str. Keys are str.

    Args:
        where: file or option, for the message.

    Raises:
        UserError: not YAML, or a key that stands twice in one section.
    """
    try:
        return _unshared(yaml.load(text, _Loader), [MOST_VALUES])
    except _Refused as error:
        raise UserError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: {_NOT_YAML}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; settings have a few levels") from None


def parse_override(item: str) -> tuple[list[str], Any]:
    """key.path=value -> the keys and the value. A value that begins with a bracket or a quote is YAML; any other is
    taken as it stands, with all its ``#`` and ``:``.

    Raises:
        UserError: no "=", or a value that begins as YAML and is none.
    """
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise UserError(f"override {item!r}: write it as key.path=value, e.g. train.max_steps=10")
    value = value.strip()
    if not value.startswith(("[", "{", '"', "'")):
        return key.split("."), Plain(value)
    try:
        return key.split("."), parse_yaml(value, f"override {item!r}")
    except UserError as error:
        if _NOT_YAML not in str(error):
            raise
        quoted = yaml.safe_dump(value, default_style='"', width=10**6, allow_unicode=True).strip()
        raise UserError(f"{error}; if it is meant as text, write {shlex.quote(f'{key}={quoted}')}") from None


def write_yaml(tree: dict) -> str:
    """The text of a tree; strings that YAML 1.1 or 1.2 would take for something else are in quotes."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def resolved_yaml(config: BaseModel) -> str:
    """The whole tree of settings, defaults included; ``load_config`` of it gives ``config`` back."""
    return write_yaml(config.model_dump(mode="json"))


_MERGE, _PLAIN = "tag:yaml.org,2002:merge", "!plain"


class _Refused(yaml.YAMLError):
    """YAML that we do not take."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {"<": [(_MERGE, re.compile("<<$"))], None: [(_PLAIN, re.compile(""))]}

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:  # as written: merge keys have brought nothing in yet
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                places = f"line {line}" if lines[key.value] == line else f"line {lines[key.value]} and in line {line}"
                raise _Refused(f"the key {key.value!r} stands twice in one section, in {places}; join the two, or "
                               "remove one")  # fmt: skip
            lines[key.value] = line
        return node


_Loader.add_constructor(_PLAIN, lambda loader, node: Plain(node.value))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


for _kind, _pattern in (("float", _FLOAT), ("int", _INT)):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern.pattern})$"),
                                  list("-+.0123456789"))  # fmt: skip


def _unshared(value: Any, left: list[int], inside: tuple[int, ...] = ()) -> Any:
    """A copy in which nothing is the same object twice: an alias is a value, not a place that changes with another.

    Args:
        left: how many more values there may be, in a list of one.
        inside: ids of what ``value`` stands in.
    """
    left[0] -= 1
    if left[0] < 0:
        raise _Refused(f"more than {MOST_VALUES:,} values once its aliases are followed")
    if not isinstance(value, dict | list):
        return value
    if id(value) in inside:
        raise _Refused("an alias (*NAME) stands inside what it repeats")
    inside = (*inside, id(value))
    if isinstance(value, list):
        return [_unshared(item, left, inside) for item in value]
    keys = {key: str(key) if isinstance(key, Plain) else key for key in value}
    return {keys[key]: _unshared(item, left, inside) for key, item in value.items()}
