"""YAML as settings are written in: text to a tree and back."""

import re
import shlex
from functools import lru_cache
from typing import Any

import yaml
from pydantic import BaseModel

from titans_pt.config.plain import FLOAT, INT, Unquoted, as_list
from titans_pt.errors import UserError

MOST_VALUES = 100_000
"""A file has no more values than this once its aliases are followed; aliases of aliases grow exponentially."""

_NOT_YAML = "not valid YAML"


def parse_yaml(text: str, where: str) -> Any:
    """dicts, lists, and for words :class:`Unquoted` or, where they have quotes, str. Keys are str.

    Args:
        where: file or option, for the message.

    Raises:
        UserError: not YAML, or a key that stands twice in one section.
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
"""A list whose texts have no brackets and no quotes."""


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
        return key.split("."), Unquoted(value)
    try:
        return key.split("."), parse_yaml(value, f"override {item!r}")
    except UserError as error:
        if _NOT_YAML not in str(error):
            raise
        texts = _LIST.fullmatch(value)  # such as [*.lora_*], in which * means something else to YAML
        text = yaml.safe_dump(value, default_style='"', width=10**6, allow_unicode=True).strip()
        kind, quoted = ("a list of texts", as_list(texts[1])) if texts else ("text", text)
        raise UserError(f"{error}; if it is meant as {kind}, write {shlex.quote(f'{key}={quoted}')}") from None


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


_Loader.add_constructor(_PLAIN, lambda loader, node: Unquoted(node.value))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


for _kind, _pattern in (("float", FLOAT), ("int", INT)):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern.pattern})$"),
                                  list("-+.0123456789"))  # fmt: skip


@lru_cache(maxsize=256)
def _loaded(text: str) -> Any:
    """Content of ``text``. Many configs inherit from the same few, and a study loads hundreds."""
    return yaml.load(text, _Loader)


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
    keys = {key: str(key) if isinstance(key, Unquoted) else key for key in value}
    return {keys[key]: _unshared(item, left, inside) for key, item in value.items()}
