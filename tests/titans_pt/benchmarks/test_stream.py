"""The stream benchmark reads as much as it should, and writes its files."""

import csv
import json

from titans_pt import cli
from titans_pt.benchmarks.stream import StretchFigures, table

WORDS = ["benchmark", "stream", "configs/quickstart.yaml", "model.mixers=[lmm]", "model.n_layers=1"]


def test_a_short_stream(tmp_path, capsys):
    assert cli.run([*WORDS, "--tokens", "1500", "--stretches", "3", "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "stream.csv").open()))
    assert [int(row["tokens"]) for row in rows] == [500, 1000, 1500]
    assert len({row["state_mib"] for row in rows}) == 1 and float(rows[0]["state_mib"]) > 0
    assert all(float(row["tokens_per_second"]) > 0 and float(row["peak_mib"]) > 50 for row in rows)
    assert json.loads((tmp_path / "stream.json").read_text())["model"]["mixers"] == ["lmm"]
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")
    assert "| 1,500 |" in capsys.readouterr().out


def test_fewer_tokens_than_stretches(capsys):
    assert cli.run([*WORDS, "--tokens", "3"]) == 2
    assert "--tokens: given 3; at least the 10 stretches" in capsys.readouterr().err


def test_table():
    found = [StretchFigures(100, 50.0, 200.0, 1.0), StretchFigures(200, 25.0, 201.0, 1.0)]
    assert table(found).splitlines() == table(found, 1.0).splitlines()[:4]
    assert table(found)[-1] == "\n" and table(found).splitlines()[2] == "| 100 | 50 | 200.0 | 1.00 |"
    mean = "mean 33 tokens/s, stretches -25.0 % to +50.0 %; peak memory +0.50 % from the first to the last"
    assert table(found, 1.0).splitlines()[-2] == mean
    assert "at the end takes 1.000 of the time" in table(found, 1.0).splitlines()[-1]
