"""Meaning of a word without quotes: it depends on the setting that it is given to.

The numbers, booleans and nulls are YAML 1.2's (core schema); PyYAML's own are those of YAML 1.1, where ``no`` is false,
``2026-01-05`` a date, ``1:30`` the number 90 and ``1e6`` a string.
"""

import json
import re
from decimal import Decimal
from typing import Any

INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
"""Booleans of YAML 1.1 alone, in small letters; they are read where a boolean is wanted, since older files have them.
"""


class Unquoted(str):
    """A word (scalar) that was written without quotes."""

    def read(self, kinds: set[type]) -> Any:
        """Reads the word as the first of null, boolean, number and text among ``kinds``, which a setting may be.

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
        """Value of the word in YAML 1.2 (digits with underscores between are read as in YAML 1.1)."""
        if self in _NULLS:
            return None
        if self in _BOOLEANS:
            return _BOOLEANS[self]
        number = _number(self)
        return str(self) if number is None else number


def _number(text: str) -> int | float | None:
    if INT.fullmatch(text):
        digits = text.replace("_", "")
        if len(digits) > 300:
            return None  # more than any float; Python refuses more than 4,300 digits
        return int(digits, 0 if digits[1:2] in ("o", "x") else 10)
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if special := _SPECIAL.fullmatch(text):
        return float(special[1] + special[2])
    return None


def usual(value: Any) -> Any:
    """A tree in which every :class:`Unquoted` is what YAML makes of it, wherever it stands."""
    if isinstance(value, Unquoted):
        return value.usual
    if isinstance(value, dict):
        return {key: usual(item) for key, item in value.items()}
    return [usual(item) for item in value] if isinstance(value, list) else value


_WORD = re.compile(r"[\w./-]+")
"""Words that YAML takes as they stand."""


def as_list(words: str) -> str:
    """A list, as YAML reads it, of words with commas between them: *.x begins a word that needs quotes."""
    each = (word.strip() for word in words.split(","))
    return "[" + ",".join(word if _WORD.fullmatch(word) else json.dumps(word) for word in each) + "]"
