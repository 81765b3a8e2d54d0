"""The benchmark measures what it says, and leaves its files."""

import csv
import json

import pytest

from titans_pt.benchmarks import memory


@pytest.mark.thorough
@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_short_benchmark(other, tmp_path, capsys, monkeypatch):
    """Run the benchmark alone, and beside titans-pytorch."""
    if not other:
        monkeypatch.setattr(memory, "find_spec", lambda name: None)
    memory.benchmark_memory(tmp_path, rounds=1, longest=1024)
    rows = list(csv.DictReader((tmp_path / "memory.csv").open()))
    assert {row["case"] for row in rows} >= {"titans_pt", "stream"}
    for row in rows:
        assert float(row["forward_seconds"]) > 0
        assert (float(row["backward_seconds"]) > 1e-3) == (row["case"] != "stream")
        assert 0 < float(row["memory_mib"]) < 10_000
    assert "torch" in json.loads((tmp_path / "memory.json").read_text())
    said = "titans-pytorch / titans_pt: time" if other else "titans-pytorch is not installed"
    assert said in capsys.readouterr().out
