"""Rows of .parquet, .jsonl and .txt files, in pieces that can be read independently."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import mmap
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

import pyarrow
from pyarrow import parquet

from titans_pt.config import SourceConfig
from titans_pt.config.names import SETTINGS, is_of_a_run
from titans_pt.data_pipeline.manifest import MANIFEST
from titans_pt.data_pipeline.text import one_line, replace_surrogates
from titans_pt.errors import UserError
from titans_pt.tools.files import unreadable


def _zstd(path: Path, _mode: str) -> io.BufferedReader:
    return io.BufferedReader(pyarrow.CompressedInputStream(arrow_file(path), "zstd"))


_OPEN: dict[str, Callable[[Path, Literal["rb"]], io.BufferedIOBase]] = {
    "": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd,
}  # fmt: skip
"""Functions that open a file, by the suffix of its compression."""
ALLOWED = (
    ".txt, .jsonl or .ndjson (each also with .gz, .bz2, .xz or .zst behind it), compressed .json with an object "
    "per line, .parquet"
)
_OF_DATASETS = (".csv", ".tsv", ".arrow", ".json")
"""Suffixes that kind=hub reads in a folder."""
_ROWS = 1024
"""Rows of a parquet file that are turned into Python objects at once."""
_HASHED = 1 << 22
"""Bytes that are hashed at once."""
_NEWLINE = rb"(?>\r\n|\n|\r)"
_COLUMNS = 20
"""Most column names that a message lists."""
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",  # UTF-32 comes first: its LE mark begins with the mark of UTF-16LE
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True)
class Rejected:
    """Input that cannot be used: its place, the reason, and a remedy. Each is one line of valid UTF-8."""

    where: str
    reason: str
    remedy: str

    def __post_init__(self):
        for name in ("where", "reason", "remedy"):
            object.__setattr__(self, name, one_line(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class SourceRow:
    """One row of a source file.

    Attributes:
        where: place of the row in words, for messages.
        file, number: place of the row for a program: row number (.parquet) or first byte (.jsonl, .txt).
        values: column name -> value.
    """

    where: str
    file: str
    number: int
    values: dict


@dataclass(frozen=True)
class Listing:
    """Files under the path of a source.

    Attributes:
        files: the files to read, in reading order, including unreadable ones (:func:`obstacle`).
        ignored: names, relative to the path, of files that are not read: other suffixes, hidden files and folders,
            folders of runs and of token files.
    """

    files: list[Path]
    ignored: list[str]


def listing(
    source: SourceConfig,
    reads: Callable[[Path, bool], bool],
    allowed: str,
    advice: Callable[[list[str]], str] = lambda names: "",
) -> Listing:
    """Lists the files under the path of a source. Links to folders are followed; hidden folders, those of runs, and
    those of token files are not entered.

    Args:
        reads: called with (path, whether it is the source's own); whether its suffix is one of those that are read.
        allowed: the suffixes that are read, for messages.
        advice: called with the names that are not read if no file is; the end of the message.

    Raises:
        UserError: the path does not exist, or holds no file with a known suffix.
    """
    given, root = f"data.sources: path={source.path!r}", Path(source.location)
    try:
        mode = os.stat(root).st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        missing_ = isinstance(error, FileNotFoundError) and not os.path.islink(root)
        reason = "no such file or folder" if missing_ else getattr(error, "strerror", None) or str(error)
        raise UserError(f"{given}: {reason}; set it to your text") from None
    if not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            raise UserError(f"{given}: a pipe or device, which cannot be read twice; write what it gives to a file")
        if not reads(root, True):
            raise UserError(f"{given}: no usable file; allowed are {allowed}{advice([root.name])}")
        return Listing([root], [])
    found, ignored = [], []
    for path, folder in _walk(root, tuple(map(_identity, root.resolve().parents))):
        name = path.relative_to(root).as_posix()
        if path.name.startswith(".") or folder and _is_ours(path):
            ignored.append(name + "/" * folder)
        elif reads(path, False) or folder or os.path.islink(path) and not os.path.exists(path):
            found.append((name, path))
        else:
            ignored.append(name)
    ignored.sort(key=lambda name: (name.startswith(".") or "/." in name, name))  # hidden ones last
    if not found:
        beside = f" (there are: {abridged(ignored)})" if ignored else " (it is empty)"
        raise UserError(f"{given}: no usable file{beside}; allowed are {allowed}{advice(ignored)}")
    return Listing([path for _, path in sorted(found)], ignored)


def abridged(names: list[str], count: int | None = None, most: int = 8) -> str:
    """The first names of a list, and how many more there are of ``count`` (None: the list is complete)."""
    more = (count or len(names)) - most
    return ", ".join(map(one_line, names[:most])) + (f" and {more:,} more" if more > 0 else "")


def other_kind(names: list[str]) -> str:
    """Advice on text files that kind=hub reads; empty without such files."""
    found = sorted({os.path.splitext(name.lower())[1] for name in names} & {*_OF_DATASETS})
    return f"; for {' and '.join(found)} set kind=hub and path to the folder" if found else ""


def _walk(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[Path, bool]]:
    """Yields (path, False) for every file under ``folder``, and (path, True) for each folder that is not entered.

    The latter are hidden folders, ours (:func:`_is_ours`), unreadable ones, and links to a folder that contains them
    (``above``: device and inode of each).
    """
    try:
        here = _identity(folder)
        entries = [] if here in above else sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder, True
        return
    if here in above:
        yield folder, True
    for entry in entries:
        path, inside = folder / entry.name, _is_folder(entry)
        if inside and not entry.name.startswith(".") and not _is_ours(path):
            yield from _walk(path, (*above, here))
        else:
            yield path, inside


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a run's or holds token files, whose logs and lists of documents are no text to train on."""
    return is_of_a_run(folder / SETTINGS) or all(os.path.isfile(folder / name) for name in (MANIFEST, "train.idx"))


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _format(path: Path, named: bool) -> tuple[str, str] | None:
    """Format by file name: (.txt, .jsonl or .parquet; suffix of the compression or ""); None if it is not read.

    Args:
        named: the path is the source's own, or was listed before. Then .json is also read; inside a folder, a .json
            file mostly describes the data.
    """
    stem, last = os.path.splitext(path.name.lower())
    compression = last if last in _OPEN else ""
    kind = os.path.splitext(stem)[1] if compression else last
    if kind == ".ndjson" or kind == ".json" and (compression or named):
        kind = ".jsonl"
    return (kind, compression) if kind in (".txt", ".jsonl") or (kind, compression) == (".parquet", "") else None


def is_text(path: Path, named: bool) -> bool:
    """Whether kind=files reads a file of this name; ``named`` as for :func:`_format`."""
    return _format(path, named) is not None


def unit_of_place(file: str) -> str:
    """Return the unit of a :class:`SourceRow`'s number in this file: "byte" (.jsonl, .txt; of the uncompressed text) or
    "row"."""
    found = _format(Path(file), named=True)
    return "byte" if found and found[0] in (".txt", ".jsonl") else "row"


def _format_of(path: Path) -> tuple[str, str]:
    """:func:`_format` of a file of a kind=files source; an obstacle need not have one."""
    found = _format(path, named=True)
    assert found is not None
    return found


def obstacle(path: Path) -> Rejected | None:
    """Reason why a path cannot be read as a file at all; None if it can be tried."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()
            link = f"a link to {os.readlink(path)}, " if os.path.islink(path) else ""
            return Rejected(str(path), f"{link}a folder that it is in itself", "remove the link")
    except OSError as error:
        reason = unreadable(path, error)
        if os.path.islink(path):
            return Rejected(
                str(path),
                f"a link to {os.readlink(path)}, which cannot be followed ({reason})",
                "restore what it leads to, or remove the link",
            )
        return Rejected(str(path), f"unreadable ({reason})", "replace or remove it")
    if not stat.S_ISREG(mode):
        return Rejected(str(path), "a pipe or device, not a file", "write what it gives to a file, or remove it")
    return None


def pieces(path: Path, source: SourceConfig, target: int) -> Iterator[tuple[int, int | None, int]]:
    """Yields (start, stop, bytes) of the pieces of a file, each of about ``target`` bytes where the format allows it.

    ``start`` and ``stop`` count row groups of .parquet (bytes: of the uncompressed columns), and bytes of .jsonl and of
    .txt with several documents. A compressed file is one piece, and an unreadable one, whose reading reports the error.
    """
    if obstacle(path) or not os.access(path, os.R_OK):
        yield 0, None, 0
        return
    size, (kind, compression) = path.stat().st_size, _format_of(path)
    if compression:
        yield 0, None, size
    elif kind == ".txt" and size > target and (separator := _separator(source)):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            start = 0
            while start < size:
                found = separator.search(text, start + target)
                stop = found.end() if found else size
                yield start, stop, stop - start
                start = stop
    elif kind == ".parquet":
        try:
            footer = parquet.read_metadata(arrow_file(path))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            unreadable(path, error)  # raises if its server failed
            yield 0, None, size
            return
        start, total = 0, 0
        if not footer.num_row_groups:
            yield 0, None, size
        for group in range(footer.num_row_groups):
            total += footer.row_group(group).total_byte_size
            if total >= target or group + 1 == footer.num_row_groups:
                yield start, group + 1, total
                start, total = group + 1, 0
    elif kind == ".jsonl" and size:
        for start in range(0, size, target):
            yield start, min(start + target, size), min(target, size - start)
    else:
        yield 0, None, size


def rows(path: Path, source: SourceConfig, start: int, stop: int | None) -> Iterator[SourceRow | Rejected]:
    """Yields the rows of one piece of a file, in order, and :class:`Rejected` in place of unreadable input.

    Raises:
        OSError: the file's server failed, one of SERVER_FAILED.
    """
    if rejected := obstacle(path) or _foreign_encoding(path, start):
        yield rejected
        return
    kind, _ = _format_of(path)
    try:
        if kind == ".parquet":
            yield from _parquet(path, source, start, stop)
        elif kind == ".txt":
            yield from _txt(path, source, start, stop)
        else:
            yield from _jsonl(path, start, stop)
    except UnicodeDecodeError as error:
        yield Rejected(str(path), f"not UTF-8 at byte {error.start}", "convert or remove it")
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        reason = unreadable(path, error)
        if "too much memory for decoding" in reason:  # a window of more than 128 MB; the file is not damaged
            yield Rejected(
                str(path),
                "compressed with too long a window (zstd --long)",
                f"decompress it: zstd -d --rm --long=31 {quote(str(path))}",
            )
        else:
            yield Rejected(str(path), f"unreadable or truncated ({reason})", "replace or remove it")


def hash_piece(path: Path, start: int, stop: int | None, update: Callable[[bytes], None]) -> None:
    """Passes the bytes of one of a file's :func:`pieces` to ``update``; the pieces together have all bytes of the file.

    Passes nothing if the file cannot be read.
    """
    if obstacle(path):
        return
    try:
        if _format(path, named=True) == (".parquet", "") and stop is not None:
            footer = parquet.read_metadata(arrow_file(path))
            last = stop == footer.num_row_groups
            start, stop = _begin(footer, start), None if last else _begin(footer, stop)
        with open(path, "rb") as file:
            file.seek(start)
            left = None if stop is None else stop - start
            while data := file.read(_HASHED if left is None else min(_HASHED, left)):
                update(data)
                left = None if left is None else left - len(data)
    except (pyarrow.ArrowException, OSError) as error:
        unreadable(path, error)  # raises if its server failed


def _begin(footer: parquet.FileMetaData, group: int) -> int:
    """First byte of a row group in a .parquet file; 0 for the first group, whose piece includes the file's header."""
    columns = [footer.row_group(group).column(i) for i in range(footer.num_columns)] if group else []
    return min((column.dictionary_page_offset or column.data_page_offset for column in columns), default=0)


def _foreign_encoding(path: Path, start: int) -> Rejected | None:
    """Rejects a text file in UTF-16 or UTF-32: it begins with a byte-order mark, or every second byte is NUL."""
    kind, compression = _format_of(path)
    if start or kind == ".parquet":
        return None
    try:
        with _OPEN[compression](path, "rb") as file:
            head = file.read(4)
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pyarrow.ArrowException):
        return None  # reading it will report what is wrong
    zeros = [byte == 0 for byte in head]
    found = [name for mark, name in _MARKS.items() if head.startswith(mark)]
    found += ["UTF-16LE"] * (zeros == [False, True] * 2) + ["UTF-16BE"] * (zeros == [True, False] * 2)
    if not found:
        return None
    return Rejected(str(path), f"{found[0]}, not UTF-8", f"convert it: iconv -f {found[0]} -t UTF-8 FILE > NEW")


def _separator(source: SourceConfig) -> re.Pattern[bytes] | None:
    """Pattern of the separator of documents in a source's .txt files, with any line ends; None: no separator."""
    root = Path(source.location)
    lone = root.is_file() and _format_of(root)[0] == ".txt"
    separator = "\n\n" * lone if source.separator is None else source.separator
    escaped = re.escape(replace_surrogates(separator).encode()).replace(b"\\\n", _NEWLINE)
    return re.compile(escaped) if separator else None


def _txt(path: Path, source: SourceConfig, start: int, stop: int | None) -> Iterator[SourceRow | Rejected]:
    """Yields the documents of a .txt file that begin in [start, stop); documents begin at both bounds."""
    separator = _separator(source)
    if separator is None:
        with _opened(path) as file:
            whole = file.read().decode("utf-8-sig")
        yield SourceRow(str(path), str(path), 0, {source.text_column: whole.replace("\r\n", "\n").replace("\r", "\n")})
        return
    with _opened(path) as file:
        if start:
            file.seek(start)
        text = file.read(-1 if stop is None else stop - start)
    begins = [0, *(match.end() for match in separator.finditer(text))]
    ends = [*(match.start() for match in separator.finditer(text)), len(text)]
    for begin, end in zip(begins, ends, strict=True):
        document = text[begin:end].strip(b"\r\n")
        if not document or document.isspace():
            continue  # an extra empty line, or the end of the file
        where = f"{path}, document at byte {start + begin}"
        try:
            value = document.decode("utf-8" if start + begin else "utf-8-sig")
        except UnicodeDecodeError as error:
            yield Rejected(where, f"not UTF-8 at byte {error.start} of it", "convert or remove it")
        else:
            value = value.replace("\r\n", "\n").replace("\r", "\n")  # as for a file that is one document
            yield SourceRow(where, str(path), start + begin, {source.text_column: value})


def _jsonl(path: Path, start: int, stop: int | None) -> Iterator[SourceRow | Rejected]:
    with _opened(path) as file:
        at, number = start, 0
        if start:  # a line belongs to the piece in which it begins
            file.seek(start - 1)
            at += len(file.readline()) - 1
        while (stop is None or at < stop) and (line := file.readline()):
            number += 1
            where = f"{path}, line at byte {at}" if start else f"{path}:{number}"
            if line.strip():
                try:
                    values = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    yield Rejected(where, f"not valid JSON ({error})", _json_remedy(line))
                except ValueError:
                    yield Rejected(where, "an integer of more than 4,300 digits", "repair or remove the line")
                except RecursionError:
                    yield Rejected(
                        where,
                        "JSON nested deeper than can be read (about 1,000 brackets in one another)",
                        "remove the line or its nested field",
                    )
                else:
                    if isinstance(values, dict):
                        yield SourceRow(where, str(path), at, values)
                    else:
                        yield Rejected(where, "not an object with fields", _json_remedy(line))
            at += len(line)
        if number == 0 and start == 0:
            yield Rejected(str(path), "an empty file", "replace or remove it")


def _json_remedy(line: bytes) -> str:
    """Remedy for a line that is not a JSON object."""
    if b"\r" in line.strip():
        return "its lines end with CR alone: tr '\\r' '\\n' < FILE > NEW"
    if line.lstrip(b" \t\xef\xbb\xbf").startswith(b"["):
        return "if the file is one array, write its objects one per line: jq -c '.[]' FILE > NEW.jsonl"
    return "repair or remove the line"


def _opened(path: Path) -> io.BufferedIOBase:
    _, compression = _format_of(path)
    return _OPEN[compression](path, "rb")


def arrow_file(path: Path) -> pyarrow.OSFile:
    """Opens a file for pyarrow, which cannot open a name that is not UTF-8.

    Not a file of Python: threads of pyarrow that release one while the interpreter ends abort the process.
    """
    return pyarrow.OSFile(os.fsencode(path))


def _parquet(path: Path, source: SourceConfig, start: int, stop: int | None) -> Iterator[SourceRow | Rejected]:
    try:
        opened = parquet.ParquetFile(arrow_file(path))
        there = opened.schema_arrow.names
    except UnicodeDecodeError:
        yield Rejected(str(path), "the name of a column is not UTF-8", "rename the column")
        return
    with opened as file:
        columns = [*source.columns, *source.minimum]
        for column in columns:
            if column not in there:
                yield missing(str(path), column, source, there)
                return
            if there.count(column) > 1:
                yield Rejected(str(path), f"has {there.count(column)} columns {column!r}", "rename all but one of them")
                return
        columns += [column for column in source.optional_columns if column in there and column not in columns]
        groups = range(start, file.num_row_groups if stop is None else stop)
        number = sum(file.metadata.row_group(group).num_rows for group in range(start))
        for group in groups:
            after = number + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=columns):
                    for values in _objects(batch):
                        where = f"{path}, row {number}"
                        if isinstance(values, UnicodeDecodeError):
                            yield Rejected(where, f"not UTF-8 at byte {values.start}", "repair or remove the row")
                        elif isinstance(values, Exception):  # such as a time that Python cannot represent
                            yield Rejected(
                                where,
                                f"a value that cannot be read ({values})",
                                f"repair the row, or name columns other than {', '.join(columns)}",
                            )
                        else:
                            yield SourceRow(where, str(path), number, values)
                        number += 1
            except (pyarrow.ArrowException, OSError) as error:
                yield Rejected(
                    f"{path}, rows {number} to {after - 1}",
                    f"unreadable or truncated ({unreadable(path, error)})",
                    "replace or remove the file",
                )
                number = after


def _objects(batch: pyarrow.RecordBatch) -> Iterator[dict | ValueError | OverflowError]:
    """Yields the rows of a batch, or the error for a row that Python cannot represent, such as text not in UTF-8."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for i in range(len(batch)):
            try:
                yield from batch.slice(i, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield error


def missing(where: str, column: str, source: SourceConfig, there: list[str]) -> Rejected:
    """Rejects a row or a file without the column ``column``, which ``source`` names."""
    columns = abridged(there, most=_COLUMNS) or "none"
    if column in source.columns:
        return Rejected(
            where,
            f"has no column as {source.setting_of(column)}={column!r} says ({columns})",
            name_another(column, source),
        )
    return Rejected(where, f"has no column {column!r} ({columns})", "name an existing one in minimum")


def name_another(column: str, source: SourceConfig) -> str:
    """Remedy for a row whose ``column``, one of ``source.columns``, does not hold what it should."""
    setting = source.setting_of(column)
    return f"set {setting} to the one that holds the {setting.removesuffix('_column')}"
