"""FASTA files: what is read, what is counted, what is refused."""

import bz2
import gzip
import lzma

import pytest

from titans_pt.genomics.fasta import Record, Unusable, is_fasta, records


def written(folder, text, name="a.fa", compress=lambda data: data):
    path = folder / name
    path.write_bytes(compress(text.encode() if isinstance(text, str) else text))
    return path


def test_headers_line_breaks_case_and_other_letters(tmp_path):
    text = ">chr1 first chromosome\r\nACGT\r\nacgt\r\n\r\n;a comment\n>empty\n>chr2\nNNRYacg tU-\n"
    found = list(records(written(tmp_path, text)))
    assert found == [
        Record("chr1", 1, b"ACGTACGT", {}),
        Record("empty", 6, b"", {}),
        Record("chr2", 7, b"NNNNACGTTN", {"R": 1, "Y": 1, "-": 1}),
    ]


@pytest.mark.parametrize("suffix, compress", [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress),
                                              (".xz", lzma.compress)])  # fmt: skip
def test_compressed(tmp_path, suffix, compress):
    path = written(tmp_path, ">a\nAC\nGT", f"a.fasta{suffix}", compress)
    assert is_fasta(path) and list(records(path)) == [Record("a", 1, b"ACGT")]


@pytest.mark.parametrize("text, where, reason", [
    (">p\nMKVLAEF*\n", "a.fa:1, record 'p'", r"looks like a protein: .*\('\*', 'E', 'F', 'L'\)"),
    (">p\nMKVMKVMKVDHS\n", "a.fa:1", "looks like a protein: only 0 of its 12 letters are A, C, G, T, U or N"),
    (">q\nACGT1\n", "a.fa:1", r"holds what is no letter of a sequence \('1'\)"),
    (">q\nAC\xe9\n", "a.fa:1", "no letter of a sequence"),
    ("ACGT\n", "a.fa:1", "no FASTA but text without a header line"),
    ("@read1\nACGT\n+\nIIII\n", "a.fa:1", "no FASTA but a FASTQ file"),
    ("", "a.fa", "an empty file"),
])  # fmt: skip
def test_what_is_refused(tmp_path, text, where, reason):
    import re

    (found,) = records(written(tmp_path, text))
    assert isinstance(found, Unusable) and where in found.where and re.search(reason, found.reason)


def test_a_bad_record_does_not_hide_the_others_and_a_truncated_file_says_so(tmp_path):
    good, bad, other = records(written(tmp_path, ">a\nAC\n>b\nEEE\n>c\nGT\n"))
    assert (good.sequence, bad.reason[:10], other.sequence) == (b"AC", "looks like", b"GT")
    cut = gzip.compress(b">a\n" + b"ACGT" * 1000)[:-10]
    (found,) = records(written(tmp_path, cut, "b.fa.gz"))
    assert "unreadable or truncated" in found.reason
