"""JSON objects with a checksum: damage is detected even if the values are still plausible."""

import json
import zlib
from pathlib import Path
from typing import Any

from titans_pt.errors import UserError
from titans_pt.tools.files import DISK_FAILED, naming

CHECKSUM = "crc32"
"""The entry of a sealed object that holds its checksum."""


def seal(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with CHECKSUM as its last entry."""
    return tree | {CHECKSUM: _crc(tree)}


def unseal(text: str | bytes) -> dict[str, Any]:
    """Parses the object in ``text`` and removes its checksum. Objects of earlier versions may lack a checksum.

    Raises:
        ValueError: not JSON, not an object, or the content does not match the checksum.
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


def read_sealed(path: Path, remedy: str) -> dict[str, Any] | None:
    """The sealed object in a file; None where there is no file.

    Args:
        remedy: advice on a file that cannot be used, for the message.

    Raises:
        UserError: it is damaged, or cannot be opened.
        OSError: the disk failed, one of DISK_FAILED.
    """
    try:
        with naming(path):
            return unseal(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        raise UserError(f"{path}: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from None


def _crc(tree: dict[str, Any]) -> str:
    """Checksum of the values, 8 hex digits; independent of spaces and line breaks in the text."""
    return f"{zlib.crc32(json.dumps(tree, separators=(',', ':')).encode()):08x}"
