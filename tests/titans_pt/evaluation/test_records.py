"""Append-only files, keys, and the Wilson interval."""

import pytest

from titans_pt.errors import UserError
from titans_pt.evaluation.records import RecordFile, digest, read_records, wilson, write_whole


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        # By hand for z^2 = 3.8415: at 0 of n the interval is [0, z^2 / (n + z^2)].
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        # (0.5 + z^2/2n -+ z sqrt(0.25/n + z^2/4n^2)) / (1 + z^2/n) at p = 1/2 is 1/2 -+ z / (2 sqrt(n + z^2)).
        (5, 10, 0.5 - 1.959964 / (2 * 13.841459**0.5), 0.5 + 1.959964 / (2 * 13.841459**0.5)),
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


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


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b'{"no": "key"}'])
def test_a_broken_whole_line_is_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"key": "a"}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"x\.jsonl: line 2"):
        read_records([path])


def test_write_whole_leaves_the_old_file_on_failure(tmp_path):
    path = tmp_path / "f"
    write_whole(path, lambda temporary: temporary.write_text("old"))

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_whole(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
