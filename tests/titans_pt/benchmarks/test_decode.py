"""titans benchmark decode at the smallest sizes."""

import csv
import json

from titans_pt import cli

SMALL = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.vocab_size=32",
         "model.window=8", "model.mac.segment=8", "model.mac.memory_tokens=4",
         "model.memory.chunk_size=4", "data.seq_len=16"]  # fmt: skip


def test_every_named_mixer_has_a_row(tmp_path, capsys):
    words = ["benchmark", "decode", "quickstart", *SMALL, "--prompt", "9", "--tokens", "3", "--rounds", "2",
             "--models", "attention,mac,gla", "--out", str(tmp_path)]  # fmt: skip
    assert cli.run(words) == 0
    rows = list(csv.DictReader((tmp_path / "decode.csv").open()))
    assert [row["model"] for row in rows] == ["attention", "mac", "gla"]
    assert float(rows[0]["of_first"]) == 1 and all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert json.loads((tmp_path / "decode.json").read_text())["prompt"] == 9
    assert "| mac |" in capsys.readouterr().out
    assert json.loads((tmp_path / "decode.json").read_text())["models"]["mac"]["mac"]["segment"] == 8
    assert cli.run([*words[:-4], "--models", "gru", "--out", str(tmp_path)]) == 2
    assert "--models: given 'gru'" in capsys.readouterr().err


def test_a_mixer_of_ones_own(tmp_path, monkeypatch, capsys):
    """The config names its module; the command imports it before it reads --models."""
    (tmp_path / "own_decoded.py").write_text(
        "from titans_pt.models.mixers.base import MIXERS\nfrom titans_pt.models.mixers.lmm import LMM\n\n"
        "@MIXERS.register\nclass Own(LMM):\n    name = 'own_decoded'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["benchmark", "decode", "quickstart", *SMALL, "--prompt", "9", "--tokens", "2", "--rounds", "1",
             "run.imports=[own_decoded]", "--models", "own_decoded", "--out", str(tmp_path)]  # fmt: skip
    assert cli.run(words) == 0
    assert "| own_decoded |" in capsys.readouterr().out


def test_which_models_are_timed(tmp_path, monkeypatch):
    """Each model keeps the file's settings of its mixer; MAC's segment is 64 in the quickstart's file."""
    found = {}
    monkeypatch.setattr("titans_pt.benchmarks.decode.measure", lambda configs, *_: found.update(configs) or [])
    monkeypatch.setattr("titans_pt.benchmarks.decode.table", lambda _: "")
    monkeypatch.setattr("titans_pt.benchmarks.decode.write_csv", lambda *_: None)

    def timed(*words):
        found.clear()
        assert cli.run(["benchmark", "decode", "quickstart", *words, "--out", str(tmp_path)]) == 0
        return {name: config.model.mixers for name, config in found.items()}

    assert list(timed()) == ["attention", "lmm", "mac", "mag", "mal"]
    assert found["mac"].model.section("mac")["segment"] == 64
    assert timed("model.mixers=[lmm]") == timed("model={mixers: [lmm]}") == {"lmm": ["lmm"]}
    assert timed("model.mixers=[lmm]", "--models", "mac,mamba+swa") == {"mac": ["mac"], "mamba+swa": ["mamba", "swa"]}
    assert found["mac"].model.section("mac")["segment"] == 64
