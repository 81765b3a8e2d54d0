"""Append-only files and keys."""

import errno
import resource

import pytest

from titans_pt.errors import UserError
from titans_pt.tools.records import RecordFile, digest, read_records


def test_digest_tells_every_part_apart():
    assert digest("a", 1) == digest("a", 1)
    assert len({digest("a", 1), digest("a", 2), digest("a1"), digest("a", "1"), digest("a", 1.0), digest()}) == 6


def test_append_survives_a_cut_line(tmp_path):
    path = tmp_path / "deep" / "x.jsonl"
    with RecordFile(path) as file:
        file.append({"key": "one", "v": 1})
        file.append({"key": "two", "v": 2})
    path.write_bytes(path.read_bytes()[:-4])
    assert read_records([path]) == {"one": {"key": "one", "v": 1}}
    with RecordFile(path) as file:
        file.append({"key": "three", "v": 3})
    assert list(read_records([path])) == ["one", "three"]


def test_first_of_two_records_counts(tmp_path):
    for name, value in (("a.jsonl", 1), ("b.jsonl", 2)):
        with RecordFile(tmp_path / name) as file:
            file.append({"key": "k", "v": value})
    assert read_records([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])["k"]["v"] == 2


@pytest.mark.parametrize(
    "line", [b"{broken", b"[1]", b'{"no": "key"}', b"\xff", bytes(50), b'{"key": "b", "v": 1, "crc32": "00000000"}']
)
def test_a_broken_whole_line_is_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"key": "a"}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"x\.jsonl: line 2"):
        read_records([path])


def test_a_single_writer(tmp_path):
    path = tmp_path / "needle.jsonl"
    with RecordFile(path) as file:
        file.append({"key": "one"})
        with pytest.raises(UserError, match=r"needle\.jsonl: another evaluation writes it; .* --out DIR"):
            RecordFile(path)
        file.append({"key": "two"})
    with RecordFile(path) as file:
        file.append({"key": "three"})
    assert list(read_records([path])) == ["one", "two", "three"]


def test_a_full_disk_names_the_file(tmp_path):
    with RecordFile(tmp_path / "records.jsonl") as file:
        file._file.close()
        file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed by the RecordFile
        with pytest.raises(OSError) as error:
            file.append({"key": "a"})
    assert error.value.filename == str(tmp_path / "records.jsonl")


def test_a_failing_disk_names_the_file(tmp_path):
    """Closing the file tries to write the line again, and fails again."""
    path = tmp_path / "records.jsonl"

    def limited(action):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            with pytest.raises(OSError) as error:
                action()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))

    def append():
        with RecordFile(path) as file:
            file.append({"key": "a"})

    limited(append)
    append()
    assert list(read_records([path])) == ["a"]
