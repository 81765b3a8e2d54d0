"""Token files in Megatron's indexed-dataset format: PREFIX.bin holds tokens, PREFIX.idx says where documents begin.

PREFIX.idx, little-endian, without padding:

    magic "MMIDIDX\\0\\0"; version u64 = 1; dtype code u8; sequences S u64; document indices D u64;
    sizes i32[S], tokens of a sequence; pointers i64[S], its first byte in .bin; document indices i64[D], the
    sequence at which each document begins, and S at the end.

What is written here has one sequence a document, so D = S + 1. Other Megatron files can be read as well.
"""

import contextlib
import hashlib
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titans_pt.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_REMEDY = "make the token files anew with: titans prepare"


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx; they get these names when all of both is on disk.

    As a context manager it finishes at the end of the block, or removes what it wrote if the block failed.

    Args:
        prefix: path without suffix, in a folder that exists.
        vocab_size: ids are in [0, vocab_size); uint16 on disk if they fit, else int32.

    Raises:
        OSError: from any method, when the disk is full or the folder not writable.
    """

    def __init__(self, prefix: str | Path, vocab_size: int):
        self._prefix = Path(prefix)
        self._code = 8 if vocab_size <= 1 << 16 else 4
        self._dtype = np.dtype(DTYPES[self._code])
        self._sizes = array("i")
        self._hash = hashlib.sha256()
        self._bin = open(self._part(".bin"), "wb")  # noqa: SIM115  closed by finish and abort

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
        data = np.asarray(ids, self._dtype).tobytes()
        self._bin.write(data)
        self._hash.update(data)
        self._sizes.append(len(ids))

    def finish(self) -> None:
        """Writes the index and gives both files their names; on failure removes what it wrote under other names."""
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.zeros(0, np.int32)
        starts = np.cumsum(sizes, dtype=np.int64) - sizes
        try:
            _sync_and_close(self._bin)
            with open(self._part(".idx"), "wb") as idx:
                idx.write(HEADER.pack(MAGIC, 1, self._code, len(sizes), len(sizes) + 1))
                idx.write(sizes.astype("<i4").tobytes())
                idx.write((starts * self._dtype.itemsize).astype("<i8").tobytes())
                idx.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
                _sync_and_close(idx)
            os.replace(self._part(".bin"), self._prefix.with_name(self._prefix.name + ".bin"))
            os.replace(self._part(".idx"), self._prefix.with_name(self._prefix.name + ".idx"))
        except OSError:
            self.abort()
            raise

    def abort(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # a full disk refuses the buffered rest, which goes anyway
            self._bin.close()
        for suffix in (".bin", ".idx"):
            self._part(suffix).unlink(missing_ok=True)

    def _part(self, suffix: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}{suffix}.part")


def _sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())  # a rename may otherwise reach the disk before the data
    file.close()


class IndexedDataset:
    """PREFIX.bin and PREFIX.idx, memory-mapped: nothing is read before it is asked for.

    Attributes:
        tokens: tokens in all.
        starts: int64 (S + 1,), stream index of the first token of each sequence, and ``tokens`` at the end.
        document_starts: int64 (documents,), stream index of the first token of each document, ascending.

    Raises:
        UserError: a file is missing, truncated, or not of this format.
    """

    def __init__(self, path_prefix: str | Path):
        self.prefix = Path(path_prefix)
        idx, bin_ = (self.prefix.with_name(self.prefix.name + suffix) for suffix in (".idx", ".bin"))
        try:
            raw, bin_bytes = np.fromfile(idx, np.uint8), bin_.stat().st_size
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}; {_REMEDY}") from None
        if len(raw) < HEADER.size:
            raise UserError(f"{idx}: truncated ({len(raw)} bytes); {_REMEDY}")
        magic, version, code, count, document_count = HEADER.unpack_from(raw)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise UserError(f"{idx}: not an indexed dataset of version 1 (Megatron's MMIDIDX); {_REMEDY}")
        if len(raw) < HEADER.size + 12 * count + 8 * document_count:
            raise UserError(f"{idx}: truncated ({len(raw)} bytes, for {count} sequences); {_REMEDY}")
        self.dtype = np.dtype(DTYPES[code])
        sizes = np.frombuffer(raw, "<i4", count, HEADER.size)
        pointers = np.frombuffer(raw, "<i8", count, HEADER.size + 4 * count)
        documents = np.frombuffer(raw, "<i8", document_count, HEADER.size + 12 * count)

        self.starts = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=self.starts[1:])
        self.tokens = int(self.starts[-1])
        if bin_bytes != self.tokens * self.dtype.itemsize:
            raise UserError(f"{bin_}: {bin_bytes} bytes, but its .idx says {self.tokens * self.dtype.itemsize}: "
                            f"truncated, or of another run; {_REMEDY}")
        if (count and sizes.min() < 0) or not np.array_equal(pointers, self.starts[:-1] * self.dtype.itemsize) or (
            document_count == 0 or documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any()
        ):
            raise UserError(f"{idx}: its sizes, pointers and documents contradict one another; {_REMEDY}")
        self.document_starts = self.starts[documents[:-1]]
        self._stream = np.memmap(bin_, self.dtype, "r") if self.tokens else np.zeros(0, self.dtype)

    def __len__(self) -> int:
        """Sequences; one a document in files that were written here."""
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        """Tokens of sequence ``i``, a read-only view."""
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return self._stream[self.starts[i]:self.starts[i + 1]]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of all sequences joined, a read-only view of shape (stop - start,)."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        return self._stream[start:stop]
