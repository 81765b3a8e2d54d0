"""Kinds of sources (data.sources.kind): where a source's pieces are, and what is in one."""

import os
import platform
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from titans_pt.config import SourceConfig
from titans_pt.data_pipeline import files, stdlib
from titans_pt.data_pipeline.files import Rejected, SourceRow
from titans_pt.data_pipeline.indexed import IndexedDataset
from titans_pt.data_pipeline.text import utf8
from titans_pt.data_pipeline.tokenizers.chat import Message, Piece, Tool
from titans_pt.errors import UserError
from titans_pt.genomics import fasta
from titans_pt.genomics.genomes import GENOMES

LETTER = "letter "
"""Prefix of the counts of letters other than A, C, G and T."""
_DOCUMENTS = 100_000
"""Documents of a piece of kind=indexed."""
_HASHED_TOKENS = 1 << 21
"""Tokens that are hashed at once."""


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
        messages, tools: for format=messages, the chat and the functions that may be called in it.
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
    tools: tuple[Tool, ...] = ()
    opening: str = ""
    continued: bool = False


Pieces = Iterator[tuple[str, int, int | None, int]]
"""(file, start, stop, bytes) of pieces that can be read independently; bytes is approximate, 0 if unknown."""
Rows = Iterator[SourceRow | Document | Rejected]


class Kind(ABC):
    """One source, read in the way of its kind.

    Attributes:
        has_text: whether documents are text; False: they are ids of tokens.
        piece_is_part: whether one process reads one piece at a time, however small it is.
    """

    has_text: ClassVar[bool] = True
    piece_is_part: ClassVar[bool] = False

    def __init__(self, source: SourceConfig):
        self.source = source

    @abstractmethod
    def pieces(self, target: int) -> Pieces:
        """Yields the pieces of the source, always in the same order; start and stop are in a unit of the kind's own.

        Args:
            target: approximate bytes of a piece, where the kind can choose them.

        Raises:
            UserError: missing path, folder without usable file, dataset that is not found.
        """

    @abstractmethod
    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        """Yields the rows or documents of a piece, in order, and :class:`Rejected` in place of unusable input.

        Args:
            counts: ``"empty"`` is raised by one for each document without content that is left out here.
        """

    @abstractmethod
    def version(self, cached: bool, times: bool) -> list:
        """Return values that JSON can hold and that change with the source."""

    def hash_content(self, file: str, start: int, stop: int | None, update: Callable[[bytes], None]) -> None:  # noqa: B027
        """Passes the bytes of a piece to ``update``, if only modification times would show that they changed."""

    def listing(self) -> files.Listing:
        """The source's files, and those beside them that are not read."""
        return files.Listing([], [])

    def contains(self, folder: Path) -> bool:
        """Whether what is written into ``folder``, a resolved path, would become part of the source."""
        return False


class Stdlib(Kind):
    def pieces(self, target: int) -> Pieces:
        yield "stdlib", 0, None, 0

    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        for name, text in stdlib.read():
            yield SourceRow(name, name, 0, {self.source.text_column: text})

    def version(self, cached: bool, times: bool) -> list:
        # times differ between two installations of the same Python; its version does not
        return [[platform.python_version()], *([name, path.stat().st_size] for name, path in stdlib.modules())]


class _OnDisk(Kind):
    """Files under ``source.path``."""

    def version(self, cached: bool, times: bool) -> list:
        root = Path(self.source.location)
        return [[path.relative_to(root).as_posix(), *_state(path, times)] for path in self.listing().files]

    def hash_content(self, file: str, start: int, stop: int | None, update: Callable[[bytes], None]) -> None:
        files.hash_piece(Path(file), start, stop, update)

    def contains(self, folder: Path) -> bool:
        return _is_in(folder, self.source)


class Files(_OnDisk):
    def pieces(self, target: int) -> Pieces:
        for path in self.listing().files:
            for start, stop, size in files.pieces(path, self.source, target):
                yield str(path), start, stop, size

    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        return files.rows(Path(file), self.source, start, stop)

    def listing(self) -> files.Listing:
        return files.listing(self.source, files.is_text, files.ALLOWED, files.other_kind)


class Fasta(_OnDisk):
    def pieces(self, target: int) -> Pieces:
        for path in self.listing().files:
            yield str(path), 0, None, 0 if files.obstacle(path) else path.stat().st_size

    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        return _blocks(Path(file), file, self.source.block, counts)

    def listing(self) -> files.Listing:
        return files.listing(self.source, lambda path, named: fasta.is_fasta(path), fasta.ALLOWED)


class Genome(Kind):
    def pieces(self, target: int) -> Pieces:
        yield self.source.genome, 0, None, 0

    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        return _blocks(GENOMES[self.source.genome].fasta(), file, self.source.block, counts)

    def version(self, cached: bool, times: bool) -> list:
        return [[self.source.genome, GENOMES[self.source.genome].package.sha256]]


class Hub(Kind):
    """The module hub is imported when it is needed: it takes seconds."""

    piece_is_part = True

    def pieces(self, target: int) -> Pieces:
        from titans_pt.data_pipeline import hub

        return hub.pieces(self.source)

    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        from titans_pt.data_pipeline import hub

        assert stop is not None  # every piece of this kind has an end
        return hub.rows(self.source, file, start, stop)

    def version(self, cached: bool, times: bool) -> list:
        from titans_pt.data_pipeline import hub

        return hub.cached_version(self.source) if cached and hub.cached(self.source) else hub.version(self.source)

    def contains(self, folder: Path) -> bool:
        return _is_in(folder, self.source)


class Indexed(Kind):
    has_text, piece_is_part = False, True

    def pieces(self, target: int) -> Pieces:
        dataset = IndexedDataset(self.source.location)
        count, per_document = len(dataset.document_starts), dataset.tokens / max(1, len(dataset.document_starts))
        for start in range(0, count, _DOCUMENTS):
            stop = min(start + _DOCUMENTS, count)
            yield self.source.location, start, stop, int((stop - start) * per_document)

    def read(self, file: str, start: int, stop: int | None, counts: Counter) -> Rows:
        assert stop is not None  # every piece of this kind has an end
        dataset = IndexedDataset(file)
        for j in range(start, stop):
            yield Document("", "", utf8(file), j, dataset.document(j))

    def version(self, cached: bool, times: bool) -> list:
        prefix = self.source.location
        if prefix.endswith((".bin", ".idx")) and not os.path.exists(f"{prefix}.idx"):
            raise UserError(f"data.sources: path: given {prefix!r}; leave {prefix[-4:]} out")
        IndexedDataset(prefix)  # raises if anything is the matter
        return [_state(Path(f"{prefix}{suffix}"), times) for suffix in (".bin", ".idx")]

    def hash_content(self, file: str, start: int, stop: int | None, update: Callable[[bytes], None]) -> None:
        assert stop is not None
        dataset = IndexedDataset(file)
        starts, tokens = dataset.document_starts, dataset.tokens
        end = starts[stop] if stop < len(starts) else tokens
        for at in range(starts[start], end, _HASHED_TOKENS):
            update(dataset.read(at, min(at + _HASHED_TOKENS, end)).tobytes())
        if start == 0:
            files.hash_piece(Path(f"{file}.idx"), 0, None, update)

    def contains(self, folder: Path) -> bool:
        return Path(self.source.location).resolve().parent == folder


KINDS: dict[str, type[Kind]] = {
    "stdlib": Stdlib, "files": Files, "fasta": Fasta, "genome": Genome, "hub": Hub, "indexed": Indexed,
}  # fmt: skip


def of_source(source: SourceConfig) -> Kind:
    return KINDS[source.kind](source)


def _is_in(folder: Path, source: SourceConfig) -> bool:
    """Whether ``folder``, a resolved path, is the one at the source's path or in it."""
    root = Path(source.location).resolve()
    return os.path.isdir(root) and folder.is_relative_to(root)  # False in a folder that may not be entered


def _state(path: Path, times: bool) -> list[int]:
    """Size and modification time of a file; [] if it cannot be read."""
    if files.obstacle(path):
        return []
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns][: 1 + times]


def _blocks(path: Path, name: str, block: int | None, counts: Counter) -> Iterator[Document | Rejected]:
    """Yields the blocks of a FASTA file's records, in order.

    Counts as empty a record without a sequence, and a block without a known base. Counts letters other than A, C, G and
    T under LETTER and the letter.
    """
    if rejected := files.obstacle(path):
        yield rejected
        return
    number = 0
    for record in fasta.records(path):
        if isinstance(record, fasta.Unusable):
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
