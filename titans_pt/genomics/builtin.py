"""Labelled sets that are made from packages: E. coli's genes, splice sites of primates, worm against human."""

import bz2
import gzip
import lzma
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from titans_pt.config import GenomeName
from titans_pt.genomics import packages
from titans_pt.genomics.alphabet import ONLY_LETTERS
from titans_pt.genomics.fasta import Record, records
from titans_pt.genomics.genomes import GENOMES
from titans_pt.genomics.sets import LabelledSet, Split

BLOCK = 16_384
"""Bases of a genome that go to the same split, to keep neighbouring windows out of different splits."""
GENES = "usr/share/doc/cct/examples/sample_projects/sample_project_3/comparison_genomes/NC_000913.gbk.gz"
SPLICE = "usr/lib/R/site-library/mlbench/data/DNA.rda"
WORM_OR_HUMAN = 4000
"""Most windows of each species."""


def coding(width: int = 100) -> LabelledSet:
    """Windows of E. coli K-12's genome, side by side: inside a protein-coding region, or touching none.

    Regions of both strands count. Both classes have equally many windows. A fifth of the genome's blocks is the test.
    """
    genome, genes = genbank(packages.text_of(packages.CCT, GENES))
    touched = np.zeros(len(genome) + 1, np.int64)
    for start, stop in genes:
        touched[start:stop] = 1
    before = np.concatenate([[0], np.cumsum(touched[:-1])])
    starts = np.arange(0, len(genome) - width + 1, width)
    covered = before[starts + width] - before[starts]
    some = {"coding": starts[covered == width], "other": starts[covered == 0]}
    return _windows({name: (genome, places) for name, places in some.items()}, width)


def worm_or_human(width: int = 200) -> LabelledSet:
    """Windows of the X chromosomes of a worm and of a human; all bases of a window are known."""
    found = {}
    genomes: dict[str, GenomeName] = {"human": "human-x", "worm": "worm-x"}
    for name, genome in genomes.items():
        (record,) = (r for r in records(GENOMES[genome].fasta()) if isinstance(r, Record))
        known = np.frombuffer(record.sequence, np.uint8) != ord("N")
        before = np.concatenate([[0], np.cumsum(known)])
        starts = np.arange(0, len(record.sequence) - width + 1, width)
        found[name] = (record.sequence, starts[before[starts + width] - before[starts] == width])
    return _windows(found, width, WORM_OR_HUMAN)


def splice() -> LabelledSet:
    """3,186 sequences of 60 bases of primates with a donor site in the middle (ei), an acceptor site (ie), or neither
    (n). A random fifth is the test."""
    frame = r_data(packages.member(packages.MLBENCH, SPLICE).read_bytes())["DNA"]
    columns, names = frame["values"], frame["attributes"]["names"]["values"]
    factor = columns[names.index("Class")]
    classes = tuple(factor["attributes"]["levels"]["values"])
    labels = np.array(factor["values"], np.int64) - 1
    bits = np.array([column["values"] for column, name in zip(columns, names, strict=True) if name != "Class"]).T - 1
    bits = bits.reshape(len(labels), -1, 3)
    letters = np.frombuffer(b"TACG", np.uint8)[(bits * [1, 2, 3]).sum(2)]
    sequences = [row.tobytes() for row in letters]
    order = np.random.RandomState(0).permutation(len(labels))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    first, second = (Split([sequences[i] for i in rows], labels[rows]) for rows in (train, test))
    return LabelledSet(classes, first, second)


SETS: dict[str, Callable[[], LabelledSet]] = {"coding": coding, "splice": splice, "worm-human": worm_or_human}
SOURCES = {
    "coding": (packages.CCT,), "splice": (packages.MLBENCH,), "worm-human": (packages.BSGENOME, packages.SMALT),
}  # fmt: skip
"""Packages that each set is made from."""


def _windows(found: dict[str, tuple[bytes, np.ndarray]], width: int, most: int | None = None) -> LabelledSet:
    """Draw equally many windows of each class, and split training and test by blocks of the genome.

    found: class -> (genome, starts of its windows).
    """
    draw = np.random.RandomState(0)
    count = min(most or 1 << 62, *(len(starts) for _, starts in found.values()))
    made = {True: ([], []), False: ([], [])}  # type: dict[bool, tuple[list[bytes], list[int]]]
    for label, name in enumerate(sorted(found)):
        genome, starts = found[name]
        for start in np.sort(draw.permutation(starts)[:count]).tolist():
            sequences, labels = made[_held_out(start // BLOCK)]
            sequences.append(genome[start : start + width])
            labels.append(label)
    train, test = (Split(sequences, np.array(labels, np.int64)) for sequences, labels in (made[False], made[True]))
    return LabelledSet(tuple(sorted(found)), train, test)


def _held_out(block: int) -> bool:
    return bool(np.random.RandomState(block).randint(5) == 0)


def genbank(text: str) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the sequence of a GenBank file, and (start, stop) of every part of its CDS features, half-open, from 0."""
    features, _, origin = text.partition("\nORIGIN")
    sequence = re.sub(r"[^a-zA-Z]", "", origin.partition("\n//")[0]).encode().translate(ONLY_LETTERS)
    genes = []
    for feature in re.finditer(r"^ {5}CDS +(\S+(?:\n {21}[^/\s]\S*)*)", features, re.MULTILINE):
        for start, stop in re.findall(r"<?(\d+)\.\.>?(\d+)", feature[1]):
            genes.append((int(start) - 1, int(stop)))
    return sequence, genes


# ---- R's format of saved data, as far as a data frame of factors needs it (R Internals, Serialization Formats)


def r_data(data: bytes) -> dict[str, Any]:
    """The objects of an .rda file by name: vectors as {"values": list, "attributes": {name: object}}."""
    for head, decompress in ((b"\x1f\x8b", gzip.decompress), (b"BZh", bz2.decompress), (b"\xfd7z", lzma.decompress)):
        if data.startswith(head):
            data = decompress(data)
    assert data[:5] in (b"RDX2\n", b"RDX3\n"), "not R's saved data"
    reader = _R(data[5:])
    assert reader.take(2) == b"X\n"
    version, *_ = (reader.number() for _ in range(3))
    if version == 3:
        reader.take(reader.number())  # the native encoding
    return reader.item()


class _R:
    def __init__(self, data: bytes):
        self.data, self.at, self.symbols = data, 0, []  # type: bytes, int, list[str]

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        return struct.unpack(">i", self.take(4))[0]

    def item(self) -> Any:
        flags = self.number()
        kind, attributed, tagged = flags & 255, bool(flags & 0x200), bool(flags & 0x400)
        if kind == 254:  # NULL
            return None
        if kind == 255:  # a reference to an earlier symbol
            return self.symbols[(flags >> 8) - 1]
        if kind == 1:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == 2:
            return dict(self._pairs(flags))
        if kind == 9:
            return None if (length := self.number()) == -1 else self.take(length).decode()
        assert not tagged
        length = self.number()
        if kind in (10, 13):  # logical, integer
            values: list = list(struct.unpack(f">{length}i", self.take(4 * length)))
        elif kind == 14:
            values = list(struct.unpack(f">{length}d", self.take(8 * length)))
        else:
            assert kind in (16, 19, 20), f"R's type {kind}"  # strings, lists
            values = [self.item() for _ in range(length)]
        return {"values": values, "attributes": self.item() if attributed else {}}

    def _pairs(self, flags: int) -> Iterator[tuple[str, Any]]:
        """The entries of a pairlist whose first flags were read."""
        while flags & 255 == 2:
            if flags & 0x200:
                self.item()
            name = self.item() if flags & 0x400 else ""
            yield name, self.item()
            flags = self.number()
        assert flags & 255 == 254
