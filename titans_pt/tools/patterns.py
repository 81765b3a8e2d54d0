"""Name patterns with * and ?, for the settings train.trainable, train.init_fresh and model.lora.layers."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from titans_pt.errors import UserError


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(setting: str, patterns: Iterable[str], names: Iterable[str], kind: str):
    """Checks that every pattern matches at least one name.

    Args:
        kind: what the names stand for, such as "parameter", for the message.

    Raises:
        UserError: a pattern matches no name.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            raise UserError(f"{setting}: {pattern!r} is the name of no {kind}; there are {known}")
