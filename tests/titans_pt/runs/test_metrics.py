"""metrics.jsonl: what it keeps, and what it leaves out."""

import errno
import json
import math
from pathlib import Path

import pytest

from titans_pt.runs.metrics import MetricsLog, read_metrics
from titans_pt.tools.sealed import seal


def write(path, steps, resumed=0):
    log = MetricsLog(path, resumed)
    for step in steps:
        log.write("train", step, loss=float(step))
    log.close()


def test_one_object_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    expected = [{"kind": "train", "step": 1, "loss": 1.0}, {"kind": "train", "step": 2, "loss": 2.0}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [seal(record) for record in expected]
    assert read_metrics(path) == expected


def test_a_branch_keeps_the_curve_that_it_leaves(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    before = path.read_text()
    MetricsLog(path, 1, branch=True).close()
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert (tmp_path / "metrics.before-1.jsonl").read_text() == before


def test_a_resume_drops_the_steps_that_come_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    write(path, [3, 4, 5], resumed=2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    write(path, [2], resumed=1)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", [
    b"\xff\xfe", bytes(80), b"[1]", b"{}",
    b'{"kind": "train", "step": "1", "loss": 1}', b'{"kind": "train", "step": 1}',
    b'{"kind": "validation", "step": 1, "loss": 1}', b'{"kind": ["train"], "step": 1}', b"[" * 100_000,
    b'{"kind": "train", "step": 2, "loss": 5.0, "crc32": "00000000"}',
])  # fmt: skip
def test_a_damaged_line_is_left_out_and_the_file_kept(tmp_path, line, caplog):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    first, second = path.read_bytes().splitlines(keepends=True)
    damaged = first + line + b"\n" + second
    path.write_bytes(damaged)
    write(path, [3], resumed=2)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damaged
    assert "metrics.jsonl: line 2 cannot be read" in caplog.text and "metrics.damaged.jsonl" in caplog.text
    path.write_bytes(bytes(300))  # all of it zeroed, without an end of line
    write(path, [4], resumed=3)
    assert (tmp_path / "metrics.damaged-2.jsonl").read_bytes() == bytes(300)
    write(path, [5], resumed=4)
    assert [r["step"] for r in read_metrics(path)] == [4, 5] and len(list(tmp_path.iterdir())) == 3


def test_records_of_earlier_versions_have_no_checksum(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    write(path, [2], resumed=1)
    assert [r["loss"] for r in read_metrics(path)] == [2.5, 2.0]


def test_not_finite_becomes_null_since_json_has_no_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write("nonfinite", 1, loss=math.nan, grad_norm=math.inf)
    log.close()
    assert read_metrics(path) == [{"kind": "nonfinite", "step": 1, "loss": None, "grad_norm": None}]


def test_a_full_disk_is_named(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log._file.close()
    with Path("/dev/full").open("a") as log._file:
        with pytest.raises(OSError) as error:
            log.write("train", 1, loss=1.0)
        log.close()
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "metrics.jsonl"))
