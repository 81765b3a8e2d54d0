"""Reading and writing whole files: a file is written completely or not at all."""

import codecs
import contextlib
import errno
import glob
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from titans_pt.errors import UserError

SERVER_FAILED = (errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENODEV)
"""Errors of a file's server, which may recover."""
DISK_FAILED = (errno.EIO, *SERVER_FAILED)
"""Errors of a disk or its server, which may be gone when a launcher restarts the command."""
_ABANDONED = 86400.0
"""Seconds without a write after which a temporary file belongs to no process."""


def write_atomically(path: Path, write: Callable[[Path], Any], durable: bool = False) -> None:
    """Lets ``write`` fill a temporary file next to ``path``, then renames it: readers see the old file or the new one.

    If anything fails, the temporary file is removed and an old file at ``path`` stays unchanged. The folder is created.
    Temporary files that killed processes left for the same ``path`` are removed after a day.

    Args:
        write: called with the path of the temporary file, which has another suffix.
        durable: wait until the content is on the disk before the rename, so that it also survives a power failure.

    Raises:
        OSError: the disk is full, for example; the error names ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(temporary):
            write(temporary)
            if durable:
                flush_to_disk(temporary)
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def copy_file(source: Path, path: Path) -> None:
    """Copies a file by :func:`write_atomically`, without its permissions and times."""
    write_atomically(path, partial(shutil.copyfile, source))


def unused(path: Path) -> Path:
    """``path``, or the first of NAME-2, NAME-3, ... that does not exist yet."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _remove_abandoned(path: Path):
    """Removes temporary files of :func:`write_atomically` that were last written to more than a day ago."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError):
            if left.suffix[1:].isdigit() and time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()


def check_room(path: Path, what: str, folder: bool = False):
    """Checks that a file (or files in a folder) can be written at ``path``, before the work whose result goes there.

    The check leaves nothing behind.

    Args:
        what: the option or setting that names the path, for the message. If the remedy is not to name another place,
            the remedy follows after a semicolon.
        folder: whether ``path`` will be a folder.

    Raises:
        UserError: it cannot be written.
        OSError: the disk failed, one of DISK_FAILED.
    """
    kind = "folder" if folder else "file"
    try:
        if path.exists() and not (path.is_dir() if folder else path.is_file()):
            problem = f"it is no {kind}" if folder or not path.is_dir() else "it is a folder"
        else:
            place = path if folder else path.parent
            while not place.exists():
                place = place.parent
            with naming(place), tempfile.TemporaryFile(dir=place):
                return
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        problem = error.strerror or str(error)
    what, _, remedy = what.partition("; ")
    raise UserError(f"{what}: {path} cannot be written to ({problem}); "
                    f"{remedy or f'name a {kind} where you may write'}")  # fmt: skip


def read_text(path: str | Path, what: str, replace: bool = False) -> str:
    """Reads a text file that a user has named, UTF-8 with or without a byte order mark; ``-`` is standard input.

    Line ends are not changed.

    Args:
        what: the setting or option that names the file, for the message.
        replace: replace bytes that are not UTF-8 by U+FFFD.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
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


def unreadable(path: Path, error: Exception) -> str:
    """The reason why a file cannot be read, in one line.

    Raises:
        OSError: the file's server failed, one of SERVER_FAILED: nothing may be wrong with the file.
    """
    if isinstance(error, OSError) and error.errno in SERVER_FAILED:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def lines_of(text: str) -> list[str]:
    """The lines of a text as editors count them: only LF and CR LF end a line, and a final line end adds no line.

    str.splitlines() also splits at a form feed, NEL, U+2028 and six others.
    """
    lines = re.split("\r?\n", text)
    return lines if lines[-1] else lines[:-1]


def write_text(path: Path, text: str) -> None:
    """Writes a text as UTF-8 with :func:`write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def flush_to_disk(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk, so that a later rename cannot reach the disk first.

    Raises:
        OSError: the disk failed; the error names ``path``.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Gives the name ``path`` to errors inside the ``with`` that name no file: those of writing, flushing and closing.

    Raises:
        OSError: as inside the ``with``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
