"""Records of FASTA files, plain or compressed, with one line for each error in them."""

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titans_pt.genomics.alphabet import CODES, ONLY_LETTERS, READ, UPPER
from titans_pt.tools.files import unreadable

SUFFIXES = (".fa", ".fasta", ".fna", ".fas")
_OPEN: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ALLOWED = "FASTA files (.fa, .fasta, .fna or .fas, each also with .gz, .bz2 or .xz behind it)"
_LEAST = 0.5
"""Share of A, C, G, T, U and N below which a sequence is taken for a protein's."""
_SHOWN = 6


@dataclass(frozen=True)
class Record:
    """One sequence.

    sequence: upper-case A, C, G, T and N alone.
    other: counts of the letters that were replaced by N.
    line: line number of the header.
    """

    name: str
    line: int
    sequence: bytes
    other: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Unusable:
    """A record, or the rest of a file, that cannot be used: its place, the reason, and a remedy for the user."""

    where: str
    reason: str
    remedy: str


def is_fasta(path: Path) -> bool:
    """Whether a file's name is that of a FASTA file."""
    return split_name(path)[1] in SUFFIXES


def split_name(path: Path) -> tuple[str, str]:
    """A file's name without its suffix, and the suffix in lower case; a compression's suffix behind it is dropped."""
    stem, suffix = os.path.splitext(path.name)
    if suffix and suffix.lower() in _OPEN:
        stem, suffix = os.path.splitext(stem)
    return stem, suffix.lower()


def records(path: Path) -> Iterator[Record | Unusable]:
    """Yield every record of a file in order, empty records included.

    An :class:`Unusable` stands in the place of a record that cannot be used. It comes last if the file is no FASTA or
    breaks off.

    Raises:
        OSError: the file's server failed, one of SERVER_FAILED.
    """
    try:
        yield from _records(path)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        yield Unusable(str(path), f"unreadable or truncated ({unreadable(path, error)})", "replace or remove it")


def _records(path: Path) -> Iterator[Record | Unusable]:
    opener = _OPEN[last if (last := os.path.splitext(path.name.lower())[1]) in _OPEN else ""]
    header, begun, number = None, 0, 0
    lines: list[bytes] = []
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith(b">"):
                if header is not None:
                    yield _record(path, header, begun, lines)
                header, begun, lines = line, number, []
            elif line.startswith(b";"):
                continue  # a comment, as the first FASTA programs wrote them
            elif header is not None:
                lines.append(line)
            elif line.strip():
                what = "a FASTQ file" if line.startswith(b"@") else "text without a header line"
                remedy = "convert it: seqtk seq -a FILE > NEW.fa" if line.startswith(b"@") else (
                    "begin it with a line '>NAME'")  # fmt: skip
                yield Unusable(f"{path}:{number}", f"no FASTA but {what}", remedy)
                return
    if header is not None:
        yield _record(path, header, begun, lines)
    else:
        yield Unusable(str(path), "an empty file", "replace or remove it")


def _record(path: Path, header: bytes, line: int, lines: list[bytes]) -> Record | Unusable:
    words = header[1:].split(maxsplit=1)
    name = words[0].decode(errors="replace") if words else ""
    found = b"".join(lines).translate(UPPER, delete=b" \t\r\n\v\f")
    counts = np.bincount(np.frombuffer(found, np.uint8), minlength=256)
    where = f"{path}:{line}, record {name!r}"
    if problem := _problem(counts, len(found)):
        return Unusable(where, problem, "name a file of nucleotides, or remove the record")
    other = {chr(byte): int(counts[byte]) for byte in np.flatnonzero(counts) if byte not in READ}
    return Record(name, line, found.translate(ONLY_LETTERS), other)


def _problem(counts: np.ndarray, length: int) -> str | None:
    """Reason why letters with these counts cannot be nucleotides; None if they can."""
    foreign = [byte for byte in np.flatnonzero(counts) if byte not in CODES]
    shown = ", ".join(repr(chr(byte)) if byte < 128 else f"byte {byte}" for byte in foreign[:_SHOWN])
    if any(not (byte < 128 and (chr(byte).isalpha() or chr(byte) == "*")) for byte in foreign):
        return f"holds what is no letter of a sequence ({shown})"
    if foreign:
        return f"looks like a protein: it holds letters that stand for no nucleotide ({shown})"
    known = int(counts[list(READ)].sum())
    if known < _LEAST * length:
        return f"looks like a protein: only {known:,} of its {length:,} letters are A, C, G, T, U or N"
    return None
