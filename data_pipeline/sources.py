"""Text sources: parts that can be read independently, and the documents of a part.

The order of parts and of their documents is always the same.
"""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np

from titans_pt.config import SourceConfig
from titans_pt.data_pipeline import files, stdlib
from titans_pt.data_pipeline.files import Rejected, SourceRow, source_files
from titans_pt.data_pipeline.indexed import IndexedDataset
from titans_pt.data_pipeline.text import replace_surrogates, utf8, visible
from titans_pt.data_pipeline.tokenizers.chat import Message, Piece, check_tools, messages_of
from titans_pt.errors import UserError
from titans_pt.genomics.fasta import Unusable, records
from titans_pt.genomics.genomes import GENOMES

PART_BYTES = 128 << 20
"""Approximate text per part: half a minute to a minute on one core, which is the most that a kill can cost."""
LETTER = "letter "
"""Prefix of the counts of letters other than A, C, G and T."""
_PART_DOCUMENTS = 100_000
"""Documents of one part, for kind=indexed."""
_HASHED_TOKENS = 1 << 21
"""Tokens that are hashed at once."""


@dataclass(frozen=True)
class Part:
    """Consecutive documents of one source, which one process tokenises at a time.

    Attributes:
        source: index of the source in those given to :func:`parts`.
        pieces: (file, start, stop) of each, in the units of the reader for this kind of source.
        bytes: approximate bytes of the text on disk; 0 if unknown.
    """

    source: int
    pieces: tuple[tuple[str, int, int | None], ...]
    bytes: int


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        text: not empty, and valid as UTF-8; "" for kind=indexed, which has no text, and for a chat until its template
            has written it.
        id: from the source's id column; "" if there is none.
        file, row: its place: the row's number, or in .jsonl and .txt the byte where it begins. All strings are valid as
            UTF-8; for a file name that is not, see :func:`titans_pt.data_pipeline.text.utf8`.
        tokens: for kind=indexed, its ids.
        pieces: for a document with answers, its text in pieces.
        messages: for format=messages, the chat.
        opening: text of the first document of a chat that takes several.
        continued: whether the next document is of the same chat.
    """

    text: str
    id: str
    file: str
    row: int
    tokens: np.ndarray | None = None
    pieces: tuple[Piece, ...] = ()
    messages: tuple[Message, ...] = ()
    opening: str = ""
    continued: bool = False


def refuse(rejected: Rejected) -> None:
    """Refuses unusable input, which is the default (data.bad_input=skip leaves it out).

    Raises:
        UserError: always.
    """
    raise UserError(f"data.sources: {rejected}, or set data.bad_input=skip")


def parts(sources: list[SourceConfig]) -> list[Part]:
    """The parts of all sources, in order; a function of the sources alone.

    Raises:
        UserError: missing path, folder without usable file, dataset that is not found.
    """
    found: list[Part] = []
    for number, source in enumerate(sources):
        pieces, size = [], 0
        for file, start, stop, piece_bytes in _pieces(source):
            pieces.append((file, start, stop))
            size += piece_bytes
            if size >= PART_BYTES or source.kind in ("hub", "indexed"):
                found.append(Part(number, tuple(pieces), size))
                pieces, size = [], 0
        if pieces:
            found.append(Part(number, tuple(pieces), size))
    return found


def _pieces(source: SourceConfig) -> Iterator[tuple[str, int, int | None, int]]:
    """Yields (file, start, stop, bytes) of pieces that can be read independently."""
    match source.kind:
        case "stdlib":
            yield "stdlib", 0, None, 0
        case "files":
            for path in source_files(source):
                for start, stop, size in files.pieces(path, source, PART_BYTES):
                    yield str(path), start, stop, size
        case "fasta":
            for path in source_files(source):
                yield str(path), 0, None, 0 if files.obstacle(path) else path.stat().st_size
        case "genome":
            yield source.genome, 0, None, 0
        case "hub":
            from titans_pt.data_pipeline import hub  # seconds to import, and only this kind needs it

            yield from hub.pieces(source)
        case "indexed":
            dataset = IndexedDataset(source.location)
            count, per_document = len(dataset.document_starts), dataset.tokens / max(1, len(dataset.document_starts))
            for start in range(0, count, _PART_DOCUMENTS):
                stop = min(start + _PART_DOCUMENTS, count)
                yield source.location, start, stop, int((stop - start) * per_document)


def obstacles(source: SourceConfig) -> Iterator[Rejected]:
    """Yields the paths under a source that should be read and cannot be opened as files (links to nothing, pipes)."""
    return files.obstacles(source) if source.kind in ("files", "fasta") else iter(())


def documents(
    source: SourceConfig,
    part: Part | None = None,
    counts: Counter | None = None,
    reject: Callable[[Rejected], None] = refuse,
) -> Iterator[Document]:
    """Yields the documents of one part of a source, or of all.

    Args:
        part: one of :func:`parts`. None: the whole source.
        counts: ``"empty"`` is raised by one for each document without a visible character, ``"filtered"`` for each
            below source.minimum; both are dropped.
        reject: called with each unusable input; if it returns, reading continues after that input.

    Raises:
        UserError: from ``reject``, or as :func:`parts`.
    """
    counts = Counter() if counts is None else counts
    for read in [part] if part else parts([source]):
        for piece in read.pieces:
            for item in _read(source, counts, *piece):
                document = item if isinstance(item, Document) else _document(item, source, counts)
                if isinstance(document, Rejected):
                    reject(document)
                elif document is not None:
                    yield document


def _read(
    source: SourceConfig, counts: Counter, file: str, start: int, stop: int | None
) -> Iterator[SourceRow | Rejected | Document]:
    match source.kind:
        case "stdlib":
            for name, text in stdlib.read():
                yield SourceRow(name, name, 0, {source.text_column: text})
        case "files":
            yield from files.rows(Path(file), source, start, stop)
        case "fasta":
            yield from _blocks(Path(file), file, source.block, counts)
        case "genome":
            yield from _blocks(GENOMES[source.genome].fasta(), file, source.block, counts)
        case "hub":
            from titans_pt.data_pipeline import hub

            assert stop is not None  # every piece of this kind has an end
            yield from hub.rows(source, file, start, stop)
        case "indexed":
            assert stop is not None  # every piece of this kind has an end
            dataset = IndexedDataset(file)
            for j in range(start, stop):
                yield Document("", "", utf8(file), j, dataset.document(j))


def _blocks(path: Path, name: str, block: int | None, counts: Counter) -> Iterator[Document | Rejected]:
    """Yields the blocks of a FASTA file's records, in order.

    Counts as empty a record without a sequence, and a block without a known base. Counts letters other than A, C, G and
    T under LETTER and the letter.
    """
    if rejected := files.obstacle(path):
        yield rejected
        return
    number = 0
    for record in records(path):
        if isinstance(record, Unusable):
            yield Rejected(record.where, record.reason, record.remedy)
            continue
        if not record.sequence:
            counts["empty"] += 1
        counts.update({LETTER + letter: count for letter, count in record.other.items()})
        counts[LETTER + "N"] += record.sequence.count(b"N") - sum(record.other.values())
        step = block or max(1, len(record.sequence))
        for start in range(0, len(record.sequence), step):
            bases = record.sequence[start : start + step]
            if bases.count(b"N") == len(bases):
                counts["empty"] += 1
            else:
                yield Document(bases.decode(), f"{record.name}:{start}", utf8(name), number)
            number += 1


def _document(row: SourceRow | Rejected, source: SourceConfig, counts: Counter) -> Document | Rejected | None:
    """The document of a row; None if it is dropped and counted."""
    if isinstance(row, Rejected):
        return row
    for column in (*source.columns, *source.minimum):
        if column not in row.values:
            return files.missing(row.where, column, source, list(row.values))
    for column, least in source.minimum.items():
        value = row.values[column]
        if value is not None and not isinstance(value, int | float | Decimal):
            return Rejected(
                f"{row.where}, column {column!r}",
                f"holds a {type(value).__name__}, not a number",
                "name another column in minimum",
            )
        if value is None or not value >= least:
            counts["filtered"] += 1
            return None
    place = _name(row.values.get(source.id_column)), utf8(row.file), row.number
    if source.format == "messages":
        messages = _messages(row, source)
        return messages if isinstance(messages, Rejected) else Document("", *place, messages=messages)
    texts = [row.values[column] for column in source.columns]
    for column, text in zip(source.columns, texts, strict=True):
        if text is not None and not isinstance(text, str):
            return Rejected(
                f"{row.where}, column {column!r}",
                f"holds a {type(text).__name__}, not text",
                files.name_another(column, source),
            )
    last = texts[-1]
    if not last or not visible(last):  # the text, or the answer
        counts["empty"] += 1
        return None
    if source.format == "text":
        return Document(replace_surrogates(last), *place)
    prompt, answer = (replace_surrogates(text or "") for text in texts)
    return Document(prompt + answer, *place, pieces=((prompt, False), (answer, True)))


def _messages(row: SourceRow, source: SourceConfig) -> tuple[Message, ...] | Rejected:
    """The chat of a row."""
    column = source.messages_column
    try:
        check_tools(row.values)
    except ValueError as error:
        return Rejected(row.where, str(error), "write them into the system message, and remove the column")
    try:
        return messages_of(row.values[column], of_arrow=files.unit_of_place(row.file) == "row")
    except ValueError as error:
        return Rejected(
            f"{row.where}, column {column!r}", str(error), "repair the row, or set messages_column to the chat's column"
        )


def _name(value: object) -> str:
    """Id of a document, from any value in the id column of its source."""
    if value is None:
        return ""
    try:
        return replace_surrogates(str(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists without end
        return ""


def fingerprint(source: SourceConfig, cached: bool = False, times: bool = True) -> str:
    """SHA-256 (hex) of names, sizes and modification times: changes with the source, without reading it.

    Args:
        cached: if the hub cannot be reached, use the copy of its dataset in the cache of ``datasets``.
        times: False leaves modification times out, which change without the text (see :func:`hash_content`).

    Raises:
        Unreachable: a dataset on the hub cannot be reached; with ``cached``, there is no copy of it either.
    """
    match source.kind:
        case "stdlib":  # times differ between two installations of the same Python; its version does not
            rows = [[platform.python_version()], *([name, path.stat().st_size] for name, path in stdlib.modules())]
        case "files" | "fasta":
            root = Path(source.location)
            rows = [[path.relative_to(root).as_posix(), *_state(path, times)] for path in source_files(source)]
        case "genome":
            rows = [[source.genome, GENOMES[source.genome].package.sha256]]
        case "hub":
            from titans_pt.data_pipeline import hub

            rows = hub.cached_version(source) if cached and hub.cached(source) else hub.version(source)
        case "indexed":
            prefix = source.location
            if prefix.endswith((".bin", ".idx")) and not Path(f"{prefix}.idx").exists():
                raise UserError(f"data.sources: path: given {prefix!r}; leave {prefix[-4:]} out")
            IndexedDataset(prefix)  # raises if anything is the matter
            rows = [_state(Path(f"{prefix}{suffix}"), times) for suffix in (".bin", ".idx")]
    return hashlib.sha256(json.dumps([source.kind, source.text_column, rows]).encode()).hexdigest()


def _state(path: Path, times: bool) -> list[int]:
    """Size and modification time of a file; [] if it cannot be read."""
    if files.obstacle(path):
        return []
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns][: 1 + times]


def hash_content(source: SourceConfig, part: Part, update: Callable[[bytes], None]) -> None:
    """Passes the bytes of a part to ``update``, for sources whose changes only modification times would show."""
    for file, start, stop in part.pieces:
        if source.kind in ("files", "fasta"):
            files.hash_piece(Path(file), start, stop, update)
        elif source.kind == "indexed":
            assert stop is not None  # every piece of this kind has an end
            starts, tokens = (dataset := IndexedDataset(file)).document_starts, dataset.tokens
            end = starts[stop] if stop < len(starts) else tokens
            for at in range(starts[start], end, _HASHED_TOKENS):
                update(dataset.read(at, min(at + _HASHED_TOKENS, end)).tobytes())
            if start == 0:
                files.hash_piece(Path(f"{file}.idx"), 0, None, update)
