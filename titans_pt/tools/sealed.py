"""JSON objects with a checksum: damage is noticed even where the values would still be plausible."""

import json
import zlib
from typing import Any

CHECKSUM = "crc32"
"""The entry of a sealed object that holds its checksum."""


def seal(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with CHECKSUM as its last entry."""
    return tree | {CHECKSUM: _crc(tree)}


def unseal(text: str | bytes) -> dict[str, Any]:
    """The object that ``text`` holds, without its checksum. One without a checksum, of an earlier version, is taken.

    Raises:
        ValueError: not JSON, not an object, or its content is not what the checksum says.
    """
    try:
        tree = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if not isinstance(tree, dict):
        raise ValueError("not a JSON object")
    if CHECKSUM in tree:
        given = tree.pop(CHECKSUM)
        if given != _crc(tree):
            raise ValueError("its content does not have the checksum that it was written with")
    return tree


def _crc(tree: dict[str, Any]) -> str:
    """Checksum of the values, 8 hex digits; spaces and line breaks of the text do not change it."""
    return f"{zlib.crc32(json.dumps(tree, separators=(',', ':')).encode()):08x}"
