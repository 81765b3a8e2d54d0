"""The benchmark measures what it says, and leaves its files."""

import csv
import json

from titans_pt.benchmarks import memory


def test_a_short_benchmark(tmp_path, capsys):
    memory.benchmark_memory(tmp_path, rounds=1, longest=1024)
    rows = list(csv.DictReader((tmp_path / "memory.csv").open()))
    assert {row["case"] for row in rows} >= {"titans_pt", "stream"}
    for row in rows:
        assert float(row["forward_seconds"]) > 0
        assert (float(row["backward_seconds"]) > 1e-3) == (row["case"] != "stream")
        assert 0 < float(row["memory_mib"]) < 10_000
    assert "torch" in json.loads((tmp_path / "memory.json").read_text())
    assert "titans-pytorch / titans_pt: time" in capsys.readouterr().out
