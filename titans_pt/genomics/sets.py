"""Labelled sequences in folders with the layout of GenomicsBenchmarks."""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titans_pt.errors import UserError
from titans_pt.genomics.alphabet import CODES, ONLY_LETTERS, READ, reverse_complement
from titans_pt.genomics.fasta import ALLOWED, Record, Unusable, is_fasta, records, split_name

INTERVALS = ("id", "region", "start", "end", "strand")
"""Columns of an interval file: half-open, counted from 0."""
SEQUENCES = ("sequence", "label")
"""Columns of a table of sequences."""
SPLITS = ("train", "test")
_LONGEST = 2**31 - 1
"""Most characters of a table's field; a sequence may exceed Python's own limit of 131,072."""
_LAYOUTS = (
    "train/ and test/ with a file CLASS.csv.gz (id, region, start, end, strand), CLASS.fa or a folder CLASS of such "
    "or .txt files for each class, or train.csv and test.csv with the columns sequence and label"
)


@dataclass
class Split:
    """Sequences of one split. sequences: upper-case A, C, G, T and N. labels: (N,) int64, indices of the classes."""

    sequences: list[bytes] = field(default_factory=list)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass
class LabelledSet:
    """A labelled set. classes: names in alphabetical order. letters: counts of the letters that were replaced by N."""

    classes: tuple[str, ...]
    train: Split
    test: Split
    letters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Interval:
    """An interval of a chromosome, half-open, from 0. place: file and line, for messages."""

    region: str
    start: int
    end: int
    strand: str
    place: str


def read_set(folder: Path, reference: Path | None) -> LabelledSet:
    """Read the set in a folder.

    Args:
        reference: FASTA of the genome (a file or a folder of chromosomes) that intervals are cut from.

    Raises:
        UserError: a file is missing, has another layout, or holds content that cannot be used.
    """
    letters: dict[str, int] = {}
    given = f"classify_dna.path: given {folder}"
    if not folder.is_dir():
        raise UserError(f"{given}; no such folder; name one with {_LAYOUTS}")
    found = {split: _split(folder, split, given, letters) for split in SPLITS}
    wanted = [piece for classes in found.values() for pieces in classes.values() for piece in pieces
              if isinstance(piece, Interval)]  # fmt: skip
    cut: dict[Interval, bytes] = {}
    if wanted:
        if reference is None:
            raise UserError(f"classify_dna.reference: given none, and {folder} has intervals; set it to the FASTA file "
                            "of the genome that they are of (GenomicsBenchmarks' human sets: GRCh38)")  # fmt: skip
        cut = cut_intervals(wanted, reference)
    if found["train"].keys() != found["test"].keys():
        raise UserError(f"{given}; train has the classes {', '.join(sorted(found['train']))}, test has "
                        f"{', '.join(sorted(found['test']))}; make them alike")  # fmt: skip
    classes = tuple(sorted(found["train"]))
    if len(classes) < 2:
        raise UserError(f"{given}; it has {len(classes)} class ({', '.join(classes)}), a classifier needs two or more")
    made = {}
    for split in SPLITS:
        sequences, labels = [], []
        for label, name in enumerate(classes):
            pieces = found[split][name]
            if not pieces:
                raise UserError(f"{given}; the class {name!r} of {split} is empty; add sequences or remove its file")
            sequences += [cut[piece] if isinstance(piece, Interval) else piece for piece in pieces]
            labels += [label] * len(pieces)
        made[split] = Split(sequences, np.array(labels, np.int64))
    return LabelledSet(classes, made["train"], made["test"], dict(sorted(letters.items())))


def source_files(folder: Path, reference: Path | None) -> list[Path]:
    """Every file that :func:`read_set` reads."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
    return found + (_reference_files(reference) if reference else [])


def _split(folder: Path, split: str, given: str, letters: dict[str, int]) -> dict[str, list]:
    """Return class -> its sequences or intervals."""
    for suffix in (".csv", ".csv.gz"):
        if (table := folder / f"{split}{suffix}").is_file():
            return _table(table, letters)
    if not (folder / split).is_dir():
        raise UserError(f"{given}; it has no {split}/ and no {split}.csv; name a folder with {_LAYOUTS}")
    found: dict[str, list] = {}
    for path in sorted((folder / split).iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            name, files = path.name, [file for file in sorted(path.iterdir()) if not file.name.startswith(".")]
        else:
            name, files = split_name(path)[0], [path]
        found.setdefault(name, []).extend(piece for file in files for piece in _pieces(file, letters))
    if not found:
        raise UserError(f"{given}; its {split}/ has no class; name a folder with {_LAYOUTS}")
    return found


def _pieces(path: Path, letters: dict[str, int]) -> Iterator[bytes | Interval]:
    """Yield the sequences or intervals in a file of one class."""
    if is_fasta(path):
        yield from _of_fasta(path, letters)
    elif path.name.endswith((".csv", ".csv.gz")):
        yield from intervals(path)
    elif path.suffix == ".txt":
        yield _cleaned(path.read_bytes(), str(path), letters)
    else:
        raise UserError(f"{path}: not a file of a class; allowed are CLASS.csv, CLASS.csv.gz, .txt and {ALLOWED}")


def _of_fasta(path: Path, letters: dict[str, int]) -> Iterator[bytes]:
    for record in records(path):
        if isinstance(record, Unusable):
            raise UserError(f"{record.where}: {record.reason}; {record.remedy}")
        if not record.sequence:
            raise UserError(f"{path}:{record.line}, record {record.name!r}: has no sequence; remove it")
        for letter, count in record.other.items():
            letters[letter] = letters.get(letter, 0) + count
        yield record.sequence


def _cleaned(data: bytes, where: str, letters: dict[str, int]) -> bytes:
    """Clean a sequence from a text file or a table: upper case, no white space, T for U, N for other letters."""
    data = b"".join(data.upper().split())
    if not data:
        raise UserError(f"{where}: has no sequence; remove it")
    foreign = sorted(set(data) - set(CODES))
    if foreign:
        shown = ", ".join(repr(chr(byte)) for byte in foreign[:6])
        raise UserError(f"{where}: holds what stands for no nucleotide ({shown}); repair or remove it")
    for byte in set(data) - set(READ):
        letters[chr(byte)] = letters.get(chr(byte), 0) + data.count(byte)
    return data.translate(ONLY_LETTERS)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield (place, fields of these columns) for every row of a table."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = io.StringIO(data.decode("utf-8-sig"), newline="")  # line ends of any system
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: unreadable ({' '.join(str(error).split())}); replace it") from None
    usual = csv.field_size_limit(_LONGEST)
    rows = csv.reader(text, strict=True)
    try:
        yield from _fields(path, rows, columns)
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num}: {error}; repair the line") from None
    finally:
        csv.field_size_limit(usual)  # it is the whole process's


def _fields(path: Path, rows: Any, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    head = [name.strip() for name in next(rows, [])]
    if missing := [name for name in columns if name not in head]:
        raise UserError(f"{path}: has no column {missing[0]!r} ({', '.join(head) or 'it is empty'}); its columns are "
                        f"to be {', '.join(columns)}")  # fmt: skip
    places = [head.index(name) for name in columns]
    for row in rows:
        place = f"{path}:{rows.line_num}"
        if row and len(row) != len(head):
            raise UserError(f"{place}: has {len(row)} fields, its head has {len(head)}; repair the line")
        if row:
            yield place, [row[n].strip() for n in places]


def _table(path: Path, letters: dict[str, int]) -> dict[str, list]:
    found: dict[str, list] = {}
    for place, (sequence, label) in _rows(path, SEQUENCES):
        if not label:
            raise UserError(f"{place}: has no label; give it one or remove the line")
        found.setdefault(label, []).append(_cleaned(sequence.encode(), place, letters))
    return found


def intervals(path: Path) -> Iterator[Interval]:
    """Yield the rows of an interval file.

    Raises:
        UserError: other columns, a start or end that is no whole number, an empty interval, an unknown strand.
    """
    for place, (_, region, start, end, strand) in _rows(path, INTERVALS):
        try:
            first, last = int(start), int(end)
        except ValueError:
            raise UserError(
                f"{place}: start {start!r} and end {end!r} must be whole numbers; repair the line"
            ) from None
        if not 0 <= first < last:
            raise UserError(f"{place}: {region}:{first}-{last} holds no base; start must be at least 0 and below end")
        if strand not in ("+", "-", ".", ""):
            raise UserError(f"{place}: strand {strand!r}; allowed: +, -, and . or nothing (read as +)")
        yield Interval(region, first, last, strand, place)


def _reference_files(reference: Path) -> list[Path]:
    if reference.is_dir():
        return [path for path in sorted(reference.iterdir()) if is_fasta(path)]
    return [reference] if reference.is_file() else []


def cut_intervals(wanted: Iterable[Interval], reference: Path) -> dict[Interval, bytes]:
    """Cut the sequence of each interval from the reference; strand - gives the reverse complement.

    Chromosomes are read one at a time, and may be named with or without "chr".

    Raises:
        UserError: the file is missing or lacks a chromosome, or an interval ends beyond its chromosome.
    """
    by_region: dict[str, list[Interval]] = {}
    for interval in wanted:
        by_region.setdefault(_plain(interval.region), []).append(interval)
    files = _reference_files(reference)
    if not files:
        raise UserError(f"classify_dna.reference: given {reference}; no such file, or no {ALLOWED} in it")
    cut: dict[Interval, bytes] = {}
    for record in (record for file in files for record in records(file)):
        if isinstance(record, Unusable):
            raise UserError(f"classify_dna.reference: {record.where}: {record.reason}; {record.remedy}")
        for interval in by_region.pop(_plain(record.name), ()):
            cut[interval] = _cut(interval, record)
    if by_region:
        first = next(iter(by_region.values()))[0]
        names = ", ".join(sorted({interval.region for rest in by_region.values() for interval in rest})[:6])
        raise UserError(f"classify_dna.reference: {reference} lacks {names}, which {first.place} and others are of; "
                        "name the genome that the intervals are of")  # fmt: skip
    return cut


def _plain(region: str) -> str:
    return region.removeprefix("chr")


def _cut(interval: Interval, record: Record) -> bytes:
    if interval.end > len(record.sequence):
        raise UserError(
            f"{interval.place}: {interval.region}:{interval.start}-{interval.end} ends beyond {record.name}, which has "
            f"{len(record.sequence):,} bases; name the genome that the intervals are of"
        )
    found = record.sequence[interval.start : interval.end]
    return reverse_complement(found) if interval.strand == "-" else found


def centre(sequence: bytes, bases: int | None) -> bytes:
    """The middle ``bases`` of a sequence; the whole sequence if it is no longer, or if ``bases`` is None."""
    if bases is None or len(sequence) <= bases:
        return sequence
    start = (len(sequence) - bases) // 2
    return sequence[start : start + bases]


def state_of(files: list[Path]) -> list[list]:
    """Name, size and modification time of files: they change when the content does."""
    return [[str(path), (status := os.stat(path)).st_size, status.st_mtime_ns] for path in files]
