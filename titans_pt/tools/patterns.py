"""Patterns of names, with * and ?, as settings give them: train.trainable, train.init_fresh, model.lora.layers."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from titans_pt.errors import UserError


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(setting: str, patterns: Iterable[str], names: Iterable[str], kind: str):
    """
    Args:
        kind: of the things that ``names`` name, for the message.

    Raises:
        UserError: a pattern is the name of none of them.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            raise UserError(f"{setting}: {pattern!r} is the name of no {kind}; there are {known}")
