"""Interpretation of words without quotes, which depends on the type of their setting.

Numbers, booleans and nulls follow YAML 1.2 (core schema). PyYAML follows YAML 1.1, where ``no`` is false,
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
"""Booleans of YAML 1.1 only, in lower case; accepted for boolean settings, since older files have them."""


class Unquoted(str):
    """A word (scalar) that was written without quotes."""

    def read(self, kinds: set[type]) -> Any:
        """Reads the word as the first that fits of null, boolean, number and text among ``kinds``, the setting's types.

        A whole number may be written as 1e6. A word that fits no type is read as YAML reads it, for the error message.
        Null is never read as text: a setting that cannot be null reports an error.
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
        """Value of the word in YAML 1.2, except that digits may have underscores between them as in YAML 1.1."""
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
            return None  # larger than any float; Python refuses more than 4,300 digits
        return int(digits, 0 if digits[1:2] in ("o", "x") else 10)
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if special := _SPECIAL.fullmatch(text):
        return float(special[1] + special[2])
    return None


def usual(value: Any) -> Any:
    """A tree in which every :class:`Unquoted` is replaced by its YAML value, whatever its setting."""
    if isinstance(value, Unquoted):
        return value.usual
    if isinstance(value, dict):
        return {key: usual(item) for key, item in value.items()}
    return [usual(item) for item in value] if isinstance(value, list) else value


_WORD = re.compile(r"[\w./-]+")
"""Words that need no quotes in YAML."""


def as_list(words: str) -> str:
    """A YAML list of comma-separated words; words such as *.x get the quotes that they need."""
    each = (word.strip() for word in words.split(","))
    return "[" + ",".join(word if _WORD.fullmatch(word) else json.dumps(word) for word in each) + "]"
