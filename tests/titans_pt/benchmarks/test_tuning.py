"""Trials of other kernel launches: which are tried, that they compute the same, and the table of results."""

import copy

import pytest
import torch

from titans_pt.benchmarks import kernels, tuning
from titans_pt.benchmarks.tuning import Launch
from titans_pt.kernels.memory.fused.configurations import KERNELS, Configuration

pytest.importorskip("triton", reason="pip install triton")


def test_every_launch_but_the_usual_is_tried_once():
    first, *others = tuning.launches(4, 16)
    assert first.kernel == "" and len(set(map(repr, others))) == len(others)
    for row in others:
        usual = KERNELS[row.kernel][kernels.WIDTH]
        assert Configuration(row.slice, row.warps) != usual and bool(row.slice) == bool(usual.slice)
    assert {row.kernel for row in others} == set(KERNELS) - {"step"}


def test_a_launch_computes_the_same_and_is_forgotten(interpreter, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "HEADS", 1)
    before = copy.deepcopy(KERNELS)
    _, usual = tuning.measured(Launch(2, 16), 16, 16, 0)
    used = []
    monkeypatch.setattr(
        tuning, "memory_call", lambda *given: used.append(dict(KERNELS["read"])) or kernels.memory_call(*given)
    )
    _, found = tuning.measured(Launch(2, 16, "read", 64, 4), 16, 16, 0)
    assert used[0][kernels.WIDTH] == Configuration(64, 4) and before == KERNELS
    for a, b in zip(found, usual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_table_has_the_fastest_of_each_shape_first():
    rows = [Launch(4, 16, milliseconds=60.0, ratio=1.0, error=0.0), Launch(4, 16, "read", 32, 8, 50.0, 0.83, 1e-3),
            Launch(4, 16, "scan", 16, 8, note="OutOfResources: shared memory")]  # fmt: skip
    lines = tuning.table(rows).splitlines()[2:]
    assert lines[0] == "| 256 | 16 | read | 32 | 8 | 50 | 0.83 | 0.001 |  |"
    assert lines[1].startswith("| 256 | 16 | as usual |") and lines[2].endswith("| OutOfResources: shared memory |")
