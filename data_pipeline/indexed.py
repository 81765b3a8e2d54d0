"""Token files in Megatron's indexed-dataset format: PREFIX.bin holds tokens, PREFIX.idx the documents' beginnings.

PREFIX.idx, little-endian, without padding:

    magic "MMIDIDX\\0\\0"; version u64 = 1; dtype code u8; sequences S u64; document indices D u64;
    sizes i32[S], tokens of a sequence; pointers i64[S], its first byte in .bin; document indices i64[D], the
    sequence at which each document begins, and S at the end.

Files written here have one sequence a document: D = S + 1. Other Megatron files can also be read. Neither
reading nor writing holds more than a piece of either file in memory.

PREFIX.crc32, little-endian, has the CRC-32 of every 4,096 bytes of PREFIX.bin as u32: reads are compared with it.
"""

import contextlib
import hashlib
import os
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from titans_pt.errors import UserError
from titans_pt.tools.files import flush_to_disk, unreadable

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
PAGE = 4096
"""Bytes of .bin per checksum: a page, so that checking a sample reads hardly more than the sample."""
REMEDY = "copy it again, or make the token files again with: titans prepare CONFIG --force"
"""Remedy for a damaged file of data.dir."""
SUFFIXES = (".bin", ".idx", ".crc32")
_PIECE = 1 << 20
"""Entries of an index that are handled at once."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of ids in [0, vocab_size): uint16 if they fit, else int32."""
    return np.dtype(DTYPES[_code(vocab_size)])


def _code(vocab_size: int) -> int:
    return 8 if vocab_size <= 1 << 16 else 4


class IndexedWriter:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.crc32; they get these names when all are complete on disk.

    As a context manager it finishes at the end of the block, or removes what it wrote if the block failed.

    Args:
        prefix: path without suffix, in a folder that exists.
        vocab_size: ids are in [0, vocab_size); see :func:`token_dtype`.

    Raises:
        OSError: from any method, when the disk is full or the folder not writable.
        ValueError: from ``add`` and ``extend``, for ids beyond vocab_size, which the dtype might turn into others.
    """

    def __init__(self, prefix: str | Path, vocab_size: int):
        self._prefix, self._vocab_size = Path(prefix), vocab_size
        self._code = _code(vocab_size)
        self._dtype = np.dtype(DTYPES[self._code])
        self._count = 0
        self._hash = hashlib.sha256()
        # Checksums of full pages; checksum and length of the current page.
        self._pages, self._page, self._filled = array("I"), 0, 0
        self._bin = open(self._part(".bin"), "wb")  # noqa: SIM115  closed by finish and abort
        self._idx = open(self._part(".idx"), "w+b")  # noqa: SIM115
        self._idx.seek(HEADER.size)  # the counts in the header are known only at the end

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    @property
    def sha256(self) -> str:
        """Hash (hex) of the .bin written so far."""
        return self._hash.hexdigest()

    def add(self, ids: Sequence[int]) -> None:
        """Appends one document of ``len(ids)`` tokens."""
        self.extend(np.asarray(ids, None if len(ids) else self._dtype), np.array([len(ids)]))

    def extend(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Appends ``len(sizes)`` documents of these lengths; ``tokens`` (sizes.sum(),) are theirs, concatenated."""
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise ValueError(f"{self._prefix}: ids from {tokens.min()} to {tokens.max()}, must be 0 to "
                             f"{self._vocab_size - 1}")  # fmt: skip
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._bin.write(data)
        self._hash.update(data)
        self._note(memoryview(data))
        self._idx.write(sizes.astype("<i4").tobytes())
        self._count += len(sizes)

    def _note(self, data: memoryview) -> None:
        """Updates the checksums of the pages with ``data``."""
        while data:
            part = data[: PAGE - self._filled]
            self._page, self._filled = zlib.crc32(part, self._page), self._filled + len(part)
            if self._filled == PAGE:
                self._pages.append(self._page)
                self._page, self._filled = 0, 0
            data = data[len(part) :]

    def finish(self) -> None:
        """Completes the index and gives the files their final names; on failure removes the temporary files."""
        try:
            self._bin.close()
            flush_to_disk(self._part(".bin"))
            pages = np.array([*self._pages, *([self._page] if self._filled else [])], "<u4")
            self._part(".crc32").write_bytes(pages.tobytes())
            flush_to_disk(self._part(".crc32"))
            idx, at = self._idx, 0
            for start in range(0, self._count, _PIECE):
                idx.seek(HEADER.size + 4 * start)
                sizes = np.frombuffer(idx.read(4 * min(_PIECE, self._count - start)), "<i4").astype(np.int64)
                ends = at + np.cumsum(sizes) * self._dtype.itemsize
                idx.seek(HEADER.size + 4 * self._count + 8 * start)
                idx.write((ends - sizes * self._dtype.itemsize).astype("<i8").tobytes())
                at = int(ends[-1])
            idx.seek(HEADER.size + 12 * self._count)
            for start in range(0, self._count + 1, _PIECE):
                idx.write(np.arange(start, min(start + _PIECE, self._count + 1), dtype="<i8").tobytes())
            idx.seek(0)
            idx.write(HEADER.pack(MAGIC, 1, self._code, self._count, self._count + 1))
            idx.close()
            flush_to_disk(self._part(".idx"))
            for suffix in SUFFIXES:
                os.replace(self._part(suffix), self._prefix.with_name(self._prefix.name + suffix))
        except OSError:
            self.abort()
            raise

    def abort(self) -> None:
        """Removes what was written."""
        for file in (self._bin, self._idx):
            with contextlib.suppress(OSError):  # a full disk refuses the buffered rest, which is dropped anyway
                file.close()
        for suffix in SUFFIXES:
            self._part(suffix).unlink(missing_ok=True)

    def _part(self, suffix: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}{suffix}.part")


class IndexedDataset:
    """PREFIX.bin and PREFIX.idx, memory-mapped: nothing stays in memory but what the system caches.

    Attributes:
        tokens: tokens in all.
        document_starts: sequence of int (documents,), stream index of the first token of each document, ascending.

    Args:
        vocab_size: ids that are read must be in [0, vocab_size); None: any.
        checked: PREFIX.crc32 exists, and tokens that are read must match it.

    Raises:
        UserError: a file is missing, truncated, or not of this format; from methods that read tokens: their part of the
            file is damaged.
        OSError: the files' server failed, one of SERVER_FAILED.
    """

    def __init__(self, path_prefix: str | Path, vocab_size: int | None = None, checked: bool = False):
        self.prefix = Path(path_prefix)
        idx, bin_ = (self.prefix.with_name(self.prefix.name + suffix) for suffix in (".idx", ".bin"))
        try:
            idx_bytes, bin_bytes = idx.stat().st_size, bin_.stat().st_size
            with open(idx, "rb") as file:
                header = file.read(HEADER.size)
        except OSError as error:
            place = Path(error.filename or idx)
            raise UserError(f"{place}: {unreadable(place, error)}; {REMEDY}") from None
        if len(header) < HEADER.size:
            raise UserError(f"{idx}: truncated ({idx_bytes} bytes); {REMEDY}")
        magic, version, code, count, document_count = HEADER.unpack(header)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise UserError(f"{idx}: not an indexed dataset of version 1 (Megatron's MMIDIDX); {REMEDY}")
        if idx_bytes < HEADER.size + 12 * count + 8 * document_count:
            raise UserError(f"{idx}: truncated ({idx_bytes} bytes, for {count} sequences); {REMEDY}")
        self.dtype = np.dtype(DTYPES[code])
        raw = np.memmap(idx, np.uint8, "r")
        self._sizes = raw[HEADER.size :][: 4 * count].view("<i4")
        self._pointers = raw[HEADER.size + 4 * count :][: 8 * count].view("<i8")
        documents = raw[HEADER.size + 12 * count :][: 8 * document_count].view("<i8")
        self.tokens = self._check(idx, documents)
        if bin_bytes != self.tokens * self.dtype.itemsize:
            raise UserError(
                f"{bin_}: {bin_bytes} bytes, but its .idx says {self.tokens * self.dtype.itemsize}: "
                f"truncated, or of another run; {REMEDY}"
            )
        self.document_starts = _DocumentStarts(self, documents)
        self._stream = np.memmap(bin_, self.dtype, "r") if self.tokens else np.zeros(0, self.dtype)
        self._vocab_size, self._pages = vocab_size, self._checksums() if checked else None

    @property
    def list_of_documents(self) -> Path:
        """PREFIX.documents.parquet, which ``titans prepare`` writes next to the stream."""
        return self.prefix.with_name(f"{self.prefix.name}.documents.parquet")

    def _checksums(self) -> np.ndarray:
        """Checksum of each PAGE of .bin, u32."""
        path = self.prefix.with_name(f"{self.prefix.name}.crc32")
        try:
            pages = np.memmap(path, "<u4", "r") if path.stat().st_size else np.zeros(0, "<u4")
        except (OSError, ValueError) as error:  # a ValueError: half a number at its end
            raise UserError(f"{path}: {unreadable(path, error)}; {REMEDY}") from None
        if len(pages) != -(-self._stream.nbytes // PAGE):
            raise UserError(f"{path}: {len(pages)} checksums for {self._stream.nbytes} bytes of .bin; {REMEDY}")
        return pages

    def _check(self, idx: Path, documents: np.ndarray) -> int:
        """Checks that sizes, pointers and documents agree; returns the number of tokens."""
        tokens, sound = 0, len(documents) > 0 and documents[0] == 0 and documents[-1] == len(self._sizes)
        for start in range(0, len(self._sizes), _PIECE):
            sizes = self._sizes[start : start + _PIECE].astype(np.int64)
            ends = tokens + np.cumsum(sizes)
            pointers = self._pointers[start : start + _PIECE]
            sound &= sizes.min() >= 0 and np.array_equal(pointers, (ends - sizes) * self.dtype.itemsize)
            tokens = int(ends[-1])
        for start in range(0, len(documents), _PIECE):
            sound &= bool((np.diff(documents[start : start + _PIECE + 1]) >= 0).all())
        if not sound:
            raise UserError(f"{idx}: its sizes, pointers and documents contradict each other; {REMEDY}")
        return tokens

    def __len__(self) -> int:
        """Number of sequences; one per document in files that we wrote."""
        return len(self._sizes)

    def __getitem__(self, i: int) -> np.ndarray:
        """Tokens of sequence ``i``, a read-only view."""
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        start = self._start(i)
        return self.read(start, start + int(self._sizes[i]))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of all sequences joined, a read-only view of shape (stop - start,)."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        tokens = self._stream[start:stop]
        if self._pages is not None:
            self._check_pages(self._pages, start, stop)
        if self._vocab_size and len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise UserError(
                f"{self.prefix}.bin: damaged: tokens {start} to {stop - 1} have ids from {tokens.min()} to "
                f"{tokens.max()}, and the vocabulary has {self._vocab_size}; {REMEDY}"
            )
        return tokens

    def _check_pages(self, checksums: np.ndarray, start: int, stop: int) -> None:
        """Compares the pages of tokens [start, stop) with their ``checksums``.

        Raises:
            UserError: a page differs from what was written.
        """
        size, content = self.dtype.itemsize, self._stream.view(np.uint8).data
        for page in range(start * size // PAGE, -(-stop * size // PAGE)):
            if zlib.crc32(content[page * PAGE : (page + 1) * PAGE]) != checksums[page]:
                first, last = page * PAGE // size, min((page + 1) * PAGE // size, self.tokens) - 1
                raise UserError(
                    f"{self.prefix}.bin: damaged: tokens {first} to {last} are not those that were written; {REMEDY}"
                )

    def document(self, j: int) -> np.ndarray:
        """Tokens of document ``j``, all its sequences joined, a read-only view."""
        last = j + 1 == len(self.document_starts)
        return self.read(self.document_starts[j], self.tokens if last else self.document_starts[j + 1])

    def lengths(self) -> Iterator[np.ndarray]:
        """Yields int32 arrays, tokens of each sequence, at most a million at once."""
        for start in range(0, len(self), _PIECE):
            yield self._sizes[start : start + _PIECE]

    def _start(self, i: int) -> int:
        return int(self._pointers[i]) // self.dtype.itemsize if i < len(self) else self.tokens


def document_begins(document_starts: Sequence[int], start: int, length: int) -> np.ndarray:
    """bool (length,): where a document begins in tokens [start, start + length) of a stream."""
    begins = np.zeros(length, bool)
    for j in range(bisect_left(document_starts, start), bisect_left(document_starts, start + length)):
        begins[document_starts[j] - start] = True
    return begins


class _DocumentStarts(Sequence[int]):
    """Starts computed on demand: an array would cost eight bytes per document in every process."""

    def __init__(self, dataset: IndexedDataset, documents: np.ndarray):
        self._dataset, self._documents = dataset, documents

    def __len__(self) -> int:
        return len(self._documents) - 1

    def __getitem__(self, j: int) -> int:  # type: ignore[override]  # it has no slices
        if not 0 <= j < len(self):
            raise IndexError(j)
        return self._dataset._start(int(self._documents[j]))
