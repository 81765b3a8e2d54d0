"""YAML of settings: conversion of text to a tree and back."""

import re
import shlex
from functools import lru_cache
from typing import Any

import yaml
from pydantic import BaseModel

from titans_pt.config.plain import FLOAT, INT, Unquoted, as_list
from titans_pt.errors import UserError

MOST_VALUES = 100_000
"""Maximum number of values in a file after resolving aliases: aliases of aliases grow exponentially."""

_NOT_YAML = "not valid YAML"


def parse_yaml(text: str, where: str) -> Any:
    """Parses YAML into dicts, lists, and words: :class:`Unquoted`, or str if they have quotes. Keys are str.

    Args:
        where: file or option, for the message.

    Raises:
        UserError: not YAML, or a section has the same key twice.
    """
    try:
        return _unshared(_loaded(text), [MOST_VALUES])
    except _Refused as error:
        raise UserError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: {_NOT_YAML}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; settings have a few levels") from None


_LIST = re.compile(r"""\[([^][{}"']*)\]""")
"""A list whose entries have no brackets and no quotes."""


def parse_override(item: str) -> tuple[list[str], Any]:
    """Splits key.path=value into its keys and its value.

    A value that begins with a bracket or a quote is YAML. Any other value is taken literally, with ``#`` and ``:``.

    Raises:
        UserError: no "=", or a value begins like YAML but is not valid.
    """
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise UserError(f"override {item!r}: write it as key.path=value, e.g. train.max_steps=10")
    value = value.strip()
    if not value.startswith(("[", "{", '"', "'")):
        return key.split("."), Unquoted(value)
    try:
        return key.split("."), parse_yaml(value, f"override {item!r}")
    except UserError as error:
        if _NOT_YAML not in str(error):
            raise
        texts = _LIST.fullmatch(value)  # such as [*.lora_*], where * begins an alias in YAML
        text = yaml.safe_dump(value, default_style='"', width=10**6, allow_unicode=True).strip()
        kind, quoted = ("a list of texts", as_list(texts[1])) if texts else ("text", text)
        raise UserError(f"{error}; if it is meant as {kind}, write {shlex.quote(f'{key}={quoted}')}") from None


def write_yaml(tree: dict) -> str:
    """A tree as YAML text; strings that YAML 1.1 or 1.2 would read as another type are in quotes."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def resolved_yaml(config: BaseModel) -> str:
    """The whole settings tree as YAML, defaults included; ``load_config`` returns the same ``config``."""
    return write_yaml(config.model_dump(mode="json"))


_MERGE, _PLAIN = "tag:yaml.org,2002:merge", "!plain"


class _Refused(yaml.YAMLError):
    """YAML that we do not accept."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {"<": [(_MERGE, re.compile("<<$"))], None: [(_PLAIN, re.compile(""))]}

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:  # as written: merge keys are not applied yet
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                places = f"line {line}" if lines[key.value] == line else f"line {lines[key.value]} and in line {line}"
                raise _Refused(f"the key {key.value!r} stands twice in one section, in {places}; join the two, or "
                               "remove one")  # fmt: skip
            lines[key.value] = line
        return node


_Loader.add_constructor(_PLAIN, lambda loader, node: Unquoted(node.value))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


for _kind, _pattern in (("float", FLOAT), ("int", INT)):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern.pattern})$"),
                                  list("-+.0123456789"))  # fmt: skip


@lru_cache(maxsize=256)
def _loaded(text: str) -> Any:
    """Content of ``text``, cached: many configs inherit from the same few, and a study loads hundreds."""
    return yaml.load(text, _Loader)


def _unshared(value: Any, left: list[int], inside: tuple[int, ...] = ()) -> Any:
    """Copies a tree without shared objects: changing the copy of an aliased value does not change the others.

    Args:
        left: number of further values allowed, in a list of one.
        inside: ids of the dicts and lists around ``value``.
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
    keys = {key: str(key) if isinstance(key, Unquoted) else key for key in value}
    return {keys[key]: _unshared(item, left, inside) for key, item in value.items()}
