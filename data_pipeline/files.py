"""Rows of .parquet, .jsonl and .txt files, in pieces that can be read without what comes before them."""

import gzip
import io
import json
import mmap
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet

from titans_pt.config import SourceConfig
from titans_pt.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_ROWS = 1024
"""Rows of a parquet file that are turned into Python objects at once."""


@dataclass(frozen=True)
class Rejected:
    """Input that cannot be used: where it is, why, and what a user can do."""

    where: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Attributes:
        where: its place in words, for messages.
        file, number: its place for a program: the row's number (.parquet) or the byte where it begins (.jsonl, .txt).
        values: what it holds, by column.
    """

    where: str
    file: str
    number: int
    values: dict


def source_files(source: SourceConfig) -> list[Path]:
    """The files of a kind=files source in reading order; hidden files and folders are left out.

    Raises:
        UserError: the path does not exist, or holds no file with a known suffix.
    """
    root = Path(source.path)
    if not root.exists():
        raise UserError(f"data.sources: path={source.path!r}: no such file or folder; set it to your text")
    files = [root] if root.is_file() else sorted(
        (path for path in root.rglob("*") if path.is_file() and not _hidden(path.relative_to(root))),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    files = [path for path in files if path.name.endswith(SUFFIXES)]
    if not files:
        raise UserError(f"data.sources: path={source.path!r}: no usable file; allowed are {', '.join(SUFFIXES)}")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def pieces(path: Path, source: SourceConfig, target: int) -> Iterator[tuple[int, int | None, int]]:
    """Yields (start, stop, bytes) of the pieces of a file, each of about ``target`` bytes where the format allows it.

    Row groups of .parquet (bytes: of the uncompressed columns), bytes of .jsonl and of .txt with several documents.
    Compressed .jsonl is one piece.
    """
    size = path.stat().st_size
    if path.name.endswith(".txt") and size > target and (separator := _separator(source)):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            start = 0
            while start < size:
                found = separator.search(text, start + target)
                stop = found.end() if found else size
                yield start, stop, stop - start
                start = stop
        return
    if path.name.endswith(".parquet"):
        try:
            footer = parquet.read_metadata(path)
        except (pyarrow.ArrowException, OSError):
            yield 0, None, size  # reading it will report what is wrong
            return
        start, total = 0, 0
        for group in range(footer.num_row_groups):
            total += footer.row_group(group).total_byte_size
            if total >= target or group + 1 == footer.num_row_groups:
                yield start, group + 1, total
                start, total = group + 1, 0
    elif path.name.endswith(".jsonl") and size:
        for start in range(0, size, target):
            yield start, min(start + target, size), min(target, size - start)
    else:
        yield 0, None, size


def rows(path: Path, source: SourceConfig, start: int, stop: int | None) -> Iterator[Row | Rejected]:
    """Rows of one piece of a file, in order. What cannot be read comes as :class:`Rejected` in its place."""
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet(path, source, start, stop)
        elif path.name.endswith(".txt"):
            yield from _txt(path, source, start, stop)
        else:
            yield from _jsonl(path, start, stop)
    except UnicodeDecodeError as error:
        yield Rejected(str(path), f"not UTF-8 at byte {error.start}", "convert or remove it")
    except (EOFError, OSError, zlib.error, pyarrow.ArrowException) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
        yield Rejected(str(path), f"unreadable or truncated ({reason})", "replace or remove it")


def _separator(source: SourceConfig) -> re.Pattern[bytes] | None:
    """What stands between the documents of a source's .txt files, with lines of either system; None: nothing."""
    lone = Path(source.path).suffix == ".txt" and Path(source.path).is_file()
    separator = "\n\n" * lone if source.separator is None else source.separator
    return re.compile(re.escape(separator.encode()).replace(b"\\\n", b"\r?\n")) if separator else None


def _txt(path: Path, source: SourceConfig, start: int, stop: int | None) -> Iterator[Row | Rejected]:
    """The documents of a .txt file that begin in [start, stop), both of which are where documents begin."""
    separator = _separator(source)
    if separator is None:
        yield Row(str(path), str(path), 0, {source.text_column: path.read_text(encoding="utf-8-sig")})
        return
    with open(path, "rb") as file:
        file.seek(start)
        text = file.read(-1 if stop is None else stop - start)
    begins = [0, *(match.end() for match in separator.finditer(text))]
    ends = [*(match.start() for match in separator.finditer(text)), len(text)]
    for begin, end in zip(begins, ends, strict=True):
        document = text[begin:end].strip(b"\r\n")
        if not document or document.isspace():
            continue  # an empty line more, or the end of the file
        where = f"{path}, document at byte {start + begin}"
        try:
            value = document.decode("utf-8" if start + begin else "utf-8-sig")
        except UnicodeDecodeError as error:
            yield Rejected(where, f"not UTF-8 at byte {error.start} of it", "convert or remove it")
        else:
            value = value.replace("\r\n", "\n").replace("\r", "\n")  # as a file that is one document is read
            yield Row(where, str(path), start + begin, {source.text_column: value})


def _jsonl(path: Path, start: int, stop: int | None) -> Iterator[Row | Rejected]:
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
                except ValueError as error:  # bad JSON, or bad UTF-8
                    yield Rejected(where, f"not valid JSON ({error})", "repair or remove the line")
                else:
                    if isinstance(values, dict):
                        yield Row(where, str(path), at, values)
                    else:
                        yield Rejected(where, "not an object with fields", "repair or remove the line")
            at += len(line)
        if number == 0 and start == 0:
            yield Rejected(str(path), "an empty file", "replace or remove it")


def _opened(path: Path):
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.endswith(".zst"):
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _parquet(path: Path, source: SourceConfig, start: int, stop: int | None) -> Iterator[Row | Rejected]:
    with parquet.ParquetFile(path) as file:
        there = file.schema_arrow.names
        columns = [source.text_column, *source.minimum]
        for column in columns:
            if column not in there:
                yield missing(str(path), column, source, there)
                return
        columns += [source.id_column] * (source.id_column in there and source.id_column not in columns)
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
                        else:
                            yield Row(where, str(path), number, values)
                        number += 1
            except (pyarrow.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())
                yield Rejected(f"{path}, rows {number} to {after - 1}", f"unreadable or truncated ({reason})",
                               "replace or remove the file")
                number = after


def _objects(batch: pyarrow.RecordBatch) -> Iterator[dict | UnicodeDecodeError]:
    """The rows of a batch; the error in place of one whose bytes are not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(len(batch)):
            try:
                yield from batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield error


def missing(where: str, column: str, source: SourceConfig, there: list[str]) -> Rejected:
    """A row or a file that lacks a column which ``source`` names."""
    columns = ", ".join(there) or "none"
    if column == source.text_column:
        return Rejected(where, f"has no column as text_column={column!r} says ({columns})",
                        "set text_column to the one that holds the text")
    return Rejected(where, f"has no column {column!r} ({columns})", "name an existing one in minimum")
