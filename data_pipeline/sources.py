"""Text sources: parts that can be read independently, and the documents of a part.

The order of parts and of their documents is always the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from titans_pt.config import SourceConfig
from titans_pt.config.data import TOOLS
from titans_pt.data_pipeline import files
from titans_pt.data_pipeline.files import Rejected, SourceRow
from titans_pt.data_pipeline.kinds import Document, of_source
from titans_pt.data_pipeline.text import replace_surrogates, utf8, visible
from titans_pt.data_pipeline.tokenizers.chat import messages_of, tools_of
from titans_pt.errors import UserError

PART_BYTES = 128 << 20
"""Approximate text per part: half a minute to a minute on one core, which is the most that a kill can cost."""


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
        pieces, size, kind = [], 0, of_source(source)
        for file, start, stop, piece_bytes in kind.pieces(PART_BYTES):
            pieces.append((file, start, stop))
            size += piece_bytes
            if size >= PART_BYTES or kind.piece_is_part:
                found.append(Part(number, tuple(pieces), size))
                pieces, size = [], 0
        if pieces:
            found.append(Part(number, tuple(pieces), size))
    return found


def obstacles(source: SourceConfig) -> Iterator[Rejected]:
    """Yields the paths under a source that should be read and cannot be opened as files (links to nothing, pipes)."""
    return filter(None, map(files.obstacle, of_source(source).listing().files))


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
    counts, kind = Counter() if counts is None else counts, of_source(source)
    for read in [part] if part else parts([source]):
        for piece in read.pieces:
            for item in kind.read(*piece, counts):
                document = item if isinstance(item, Document) else _document(item, source, counts)
                if isinstance(document, Rejected):
                    reject(document)
                elif document is not None:
                    yield document


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
        of_arrow = files.unit_of_place(row.file) == "row"
        try:
            messages = messages_of(row.values[column := source.messages_column], of_arrow)
        except ValueError as error:
            remedy = "repair the row, or set messages_column to the chat's column"
            return Rejected(f"{row.where}, column {column!r}", str(error), remedy)
        try:
            tools = tools_of(row.values.get(TOOLS), of_arrow)
        except ValueError as error:
            return Rejected(f"{row.where}, column {TOOLS!r}", str(error), "repair the row, or remove the column")
        return Document("", *place, messages=messages, tools=tools)
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
    rows = of_source(source).version(cached, times)
    return hashlib.sha256(json.dumps([source.kind, source.text_column, rows]).encode()).hexdigest()


def hash_content(source: SourceConfig, part: Part, update: Callable[[bytes], None]) -> None:
    """Passes the bytes of a part to ``update``, for sources whose changes only modification times would show."""
    kind = of_source(source)
    for piece in part.pieces:
        kind.hash_content(*piece, update)
