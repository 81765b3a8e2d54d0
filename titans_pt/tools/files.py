"""Files that are either there as a whole or not there."""

import codecs
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titans_pt.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], Any], durable: bool = False) -> None:
    """Lets ``write`` fill a temporary file next to ``path``, then renames it: readers see the old file or the new one.

    Whatever fails, the temporary file is removed and an old file at ``path`` stays as it was. The folder is made.

    Args:
        write: is given the path of the temporary file, which has another suffix.
        durable: wait until the content is on the disk before the rename, so that it also survives a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        if durable:
            flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_room(path: Path, what: str, folder: bool = False):
    """Tries whether a file (or files in a folder) can be written at ``path``, before the work whose result goes there.
    Nothing is left behind.

    Args:
        what: the option or setting that names it, and what to do instead after a semicolon if that is not to name
            another place.
        folder: whether ``path`` is to be a folder.

    Raises:
        UserError: it cannot be.
    """
    kind = "folder" if folder else "file"
    try:
        if path.exists() and not (path.is_dir() if folder else path.is_file()):
            problem = f"it is no {kind}" if folder or not path.is_dir() else "it is a folder"
        else:
            place = path if folder else path.parent
            while not place.exists():
                place = place.parent
            with tempfile.TemporaryFile(dir=place):
                return
    except OSError as error:
        problem = error.strerror
    what, _, remedy = what.partition("; ")
    raise UserError(f"{what}: {path} cannot be written to ({problem}); "
                    f"{remedy or f'name a {kind} where you may write'}")  # fmt: skip


def read_text(path: str | Path, what: str, replace: bool = False) -> str:
    """The text of a file that a user has named, UTF-8 with or without a byte order mark; ``-`` is standard input.

    Line ends stay as they are in the file.

    Args:
        what: the setting or option that names it, for the message.
        replace: bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{what}: {path}: UTF-16, not UTF-8; convert it")
        return content.decode("utf-8-sig", "replace" if replace else "strict")
    except OSError as error:
        raise UserError(f"{what}: {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: {path}: not UTF-8 at byte {error.start}; convert it") from None


def lines_of(text: str) -> list[str]:
    """The lines of a text as editors count them: only LF and CR LF end a line, and the last line may have an end.

    str.splitlines() also cuts at a form feed, NEL, U+2028 and six others.
    """
    lines = re.split("\r?\n", text)
    return lines if lines[-1] else lines[:-1]


def write_text(path: Path, text: str) -> None:
    """:func:`write_atomically` of a text, as UTF-8."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def flush_to_disk(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk, so that a later rename cannot reach the disk first."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
