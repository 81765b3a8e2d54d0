"""Labelled sets: every layout, cut from a genome or complete, and one line for each mistake."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from titans_pt.errors import UserError
from titans_pt.genomics.builtin import SETS, genbank
from titans_pt.genomics.sets import LabelledSet, centre, read_set

GENOME = {"chr1": "ACGTACGTTTGACCA", "2": "GGGGCCCCAATT"}


def intervals(*rows: str) -> bytes:
    return gzip.compress("\n".join(["id,region,start,end,strand", *rows, ""]).encode(), mtime=0)


@pytest.fixture
def genome(tmp_path) -> Path:
    path = tmp_path / "genome.fa"
    path.write_text("".join(f">{name} of a test\n{bases[:6]}\n{bases[6:].lower()}\n" for name, bases in GENOME.items()))
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """GenomicsBenchmarks' layout: intervals of two classes."""
    root = tmp_path / "set"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        (root / split / "negative.csv.gz").write_bytes(intervals("0,chr1,0,4,", "1,chr2,4,8,-"))
        (root / split / "positive.csv.gz").write_bytes(intervals("7,chr1,10,15,-"))
    return root


def test_intervals_are_cut_from_the_genome(folder, genome):
    """Intervals are half-open, from 0; strand - gives the other strand; "chr" is optional; lower case is upper case."""
    (folder / "train" / ".DS_Store").write_bytes(b"of a file manager")
    found = read_set(folder, genome)
    assert found.classes == ("negative", "positive")
    assert found.train.sequences == [b"ACGT", b"GGGG", b"TGGTC"] and found.train.labels.tolist() == [0, 0, 1]
    by_chromosome = folder / "genome"
    by_chromosome.mkdir()
    for record in genome.read_text().split(">")[1:]:
        (by_chromosome / f"{record.split()[0]}.fa").write_text(f">{record}")
    assert read_set(folder, by_chromosome).train.sequences == found.train.sequences


def test_sequences_as_they_stand(tmp_path):
    """FASTA files, a folder of text files per class, and a table give the same set."""
    made: list[LabelledSet] = []
    for kind in ("fasta", "texts", "table"):
        root = tmp_path / kind
        for split in ("train", "test"):
            (root / split).mkdir(parents=True)
            if kind == "fasta":
                (root / split / "a.fa").write_text(">x\nACGTr\n>y\nAC\n")
                (root / split / "b.fasta.gz").write_bytes(gzip.compress(b">z\nGGN"))
            elif kind == "texts":
                for name, text in {"a/0": "acgtr\n", "a/1": "AC", "b/0": "GGN"}.items():
                    (root / split / name).parent.mkdir(exist_ok=True)
                    (root / split / f"{name}.txt").write_text(text)
            else:
                (root / split).rmdir()
                (root / f"{split}.csv").write_text("label,sequence\na,ACGTR\nb,GGN\na,AC\n")
        made.append(read_set(root, None))
    for found in made:
        assert found.classes == ("a", "b") and found.letters == {"R": 2}
        assert found.train.sequences == found.test.sequences == [b"ACGTN", b"AC", b"GGN"]
        assert found.test.labels.tolist() == [0, 0, 1]


def test_dots_are_part_of_a_class(tmp_path):
    files = {"H3K4.v1.fa": b">x\nAC", "H3K4.v2.FA.GZ": gzip.compress(b">x\nAC"), "H3K4.v3/0.txt": b"AC"}
    for path, content in ((tmp_path / split / name, files[name]) for split in ("train", "test") for name in files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert read_set(tmp_path, None).classes == ("H3K4.v1", "H3K4.v2", "H3K4.v3")


def test_tables_of_any_program(tmp_path):
    """Spreadsheets write a byte order mark and other line ends; a sequence may be longer than Python's csv allows."""
    for text in ("\ufefflabel,sequence\ra,ACGT\rb,GG\r", "label,sequence\r\na,ACGT\r\n\r\nb,GG\r\n",
                 f"label,sequence\na,{'ACGT' * 50_000}\nb,GG", "label, sequence\na ,ACGT\nb, GG\n"):  # fmt: skip
        for split in ("train", "test"):
            (tmp_path / f"{split}.csv").write_bytes(text.encode())
        found = read_set(tmp_path, None)
        assert found.classes == ("a", "b") and found.train.sequences[1] == b"GG"
        assert found.train.sequences[0].startswith(b"ACGT")


def broken(folder: Path, name: str, rows: bytes):
    (folder / "train" / name).write_bytes(rows)


# The messages are the tests' ids: gzip puts the time into the bytes, and ids of bytes would differ between workers.
@pytest.mark.parametrize("rows, message", [
    (gzip.compress(b"id,chrom,start,end,strand\n"), r"negative.csv.gz: has no column 'region' \(id, chrom, start"),
    (intervals("0,chr1,0,99,+"), r"chr1:0-99 ends beyond chr1, which has 15 bases; name the genome"),
    (intervals("0,chr9,0,4,+"), r"genome.fa lacks chr9, which .*negative.csv.gz:2 and others are of"),
    (intervals("0,chr1,4,4,+"), "chr1:4-4 holds no base"),
    (intervals("0,chr1,a,4,+"), "start 'a' and end '4' must be whole numbers"),
    (intervals("0,chr1,0,4,x"), r"strand 'x'; allowed: \+, -, and \. or nothing"),
    (intervals("0,chr1,0,4"), "csv.gz:2: has 4 fields, its head has 5"),
    (intervals(), "the class 'negative' of train is empty"),
    (b"no gzip", "negative.csv.gz: unreadable"),
    (gzip.compress(b"id,region" * 99)[:12] + bytes(30), "negative.csv.gz: unreadable"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_wrong_with_intervals(folder, genome, rows, message):
    broken(folder, "negative.csv.gz", rows)
    with pytest.raises(UserError, match=message) as error:
        read_set(folder, genome)
    assert "\n" not in str(error.value)


def test_what_is_wrong_with_a_folder(folder, genome, tmp_path):
    with pytest.raises(
        UserError, match="classify_dna.reference: given none, and .* has intervals; set it to the FASTA"
    ):
        read_set(folder, None)
    with pytest.raises(UserError, match="classify_dna.reference: given .*none.fa; no such file"):
        read_set(folder, tmp_path / "none.fa")
    with pytest.raises(UserError, match="no such folder"):
        read_set(tmp_path / "none", None)
    (folder / "test" / "other.csv.gz").write_bytes(intervals("0,chr1,0,4,+"))
    with pytest.raises(UserError, match="train has the classes negative, positive, test has negative, other, positive"):
        read_set(folder, genome)
    (folder / "test" / "notes.md").write_text("x")
    with pytest.raises(UserError, match="notes.md: not a file of a class"):
        read_set(folder, genome)
    (tmp_path / "lone").mkdir()
    with pytest.raises(UserError, match="it has no train/ and no train.csv; name a folder with train/ and test/"):
        read_set(tmp_path / "lone", None)
    (tmp_path / "lone" / "train").mkdir()
    with pytest.raises(UserError, match="its train/ has no class; name a folder with train/ and test/"):
        read_set(tmp_path / "lone", None)
    (folder / "test" / "notes.md").unlink()
    (folder / "test" / "other.csv.gz").unlink()
    genome.write_text("no FASTA")
    with pytest.raises(UserError, match="classify_dna.reference: .*genome.fa:1: no FASTA but text without a header"):
        read_set(folder, genome)


@pytest.mark.parametrize(("text", "message"), [
    ("ACGT\n", "a.fa:1: no FASTA but text without a header line; begin it with a line"),
    (">x\n>y\nAC\n", "a.fa:1, record 'x': has no sequence; remove it"),
])  # fmt: skip
def test_what_is_wrong_with_a_class_of_fasta(tmp_path, text, message):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.fa").write_text(text)
    with pytest.raises(UserError, match=message):
        read_set(tmp_path, None)


def test_what_is_wrong_with_sequences(tmp_path):
    for text, message in {
        "sequence,label\nACGT,a\nMKL*,b\n": r"train.csv:3: holds what stands for no nucleotide \('\*', 'L'\)",
        "sequence,label\nACGT,a\n,b\n": "train.csv:3: has no sequence",
        "seq,label\nACGT,a\n": "train.csv: has no column 'sequence'",
        "sequence,label\nACGT,a\n": "it has 1 class",
        "": "it is empty",
        "sequence,label\nACGT,a\nAC, \n": "train.csv:3: has no label; give it one or remove the line",
        'sequence,label\nACGT,a\n"AC"GT,b\n': "train.csv:3: .+; repair the line",
    }.items():
        (tmp_path / "train.csv").write_text(text)
        (tmp_path / "test.csv").write_text("sequence,label\nACGT,a\n")
        with pytest.raises(UserError, match=message):
            read_set(tmp_path, None)


def test_the_middle():
    assert centre(b"ACGTA", 3) == b"CGT" and centre(b"ACGTA", 4) == b"ACGT" and centre(b"AC", 3) == b"AC"
    assert centre(b"ACGTA", None) == b"ACGTA"


def test_genes_of_a_genbank_file():
    text = """LOCUS       X
FEATURES             Location/Qualifiers
     source          1..30
     gene            2..7
     CDS             2..7
                     /gene="a"
     CDS             complement(join(10..12,
                     15..>18))
                     /note="CDS 1..2"
ORIGIN
        1 acgtacgtac gtacgtacgt
       21 acgtacgtan
//
"""
    sequence, genes = genbank(text)
    assert sequence == b"ACGTACGTACGTACGTACGTACGTACGTAN" and genes == [(1, 7), (9, 12), (14, 18)]


@pytest.mark.slow  # downloads 43 MB
def test_sets_from_packages():
    coding, splice = SETS["coding"](), SETS["splice"]()
    assert [len(split.labels) for split in (coding.train, coding.test)] == [5320, 1248]
    assert np.bincount(np.concatenate([splice.train.labels, splice.test.labels])).tolist() == [767, 765, 1654]
    donors = [s[30:32] for s, label in zip(splice.train.sequences, splice.train.labels, strict=True) if label == 0]
    acceptors = [s[28:30] for s, label in zip(splice.train.sequences, splice.train.labels, strict=True) if label == 1]
    assert donors.count(b"GT") > 0.98 * len(donors) and acceptors.count(b"AG") > 0.98 * len(acceptors)
