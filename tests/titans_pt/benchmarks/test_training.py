"""The training benchmark at the smallest size: every case is measured, and failures say why."""

import csv
import json

import pytest

from titans_pt import cli
from titans_pt.benchmarks import training
from titans_pt.benchmarks.training import Case, Measurement, benchmark_training, case_config, table
from titans_pt.errors import UserError

SMALL = "configs/quickstart.yaml"


def test_case_settings():
    config = case_config(Case("mag", 512, depth=3, chunk=16), SMALL, ["train.lr=0.5"], 2048)
    assert config.model.pattern == ["mag"] * 3 and config.data.seq_len == 512
    assert (config.model.memory.depth, config.model.memory.chunk_size) == (3, 16)
    assert config.train.batch_tokens == 2048 and config.train.lr == 0.5
    paper = case_config(Case("transformer", 4096), "configs/170m/{model}.yaml", [], 32768)
    assert set(paper.model.pattern) == {"attention"}
    hybrid = case_config(Case("samba", 4096), "configs/170m/{model}.yaml", [], 32768)
    assert hybrid.model.pattern == ["mamba", "swa"] * 6


@pytest.mark.thorough
def test_measures_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "DEPTHS", (1,))
    monkeypatch.setattr(training, "CHUNKS", ())
    models = ["lmm", "no_such_model"]
    benchmark_training(tmp_path, SMALL, [], models, [256], 512, sweeps=True)
    with (tmp_path / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["model"], r["length"], r["depth"]) for r in rows] == [
        ("lmm", "256", ""), ("no_such_model", "256", ""), ("lmm", "256", "1"),
    ]  # fmt: skip
    assert all(float(r["tokens_per_second"]) > 0 and float(r["peak_mib"]) > 50 for r in (rows[0], rows[2]))
    assert int(rows[2]["parameters"]) < int(rows[0]["parameters"])
    assert "model.mixers: given 'no_such_model'" in rows[1]["failure"]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "training.json").read_text())["tokens"] == 512
    assert "| lmm | 256 |" in capsys.readouterr().out


def test_another_task_is_refused_with_words_that_help():
    own = "configs/recall/{model}.yaml"
    with pytest.raises(UserError, match="^task: given 'recall'; .*give task=language train.stop_when=null$"):
        case_config(Case("lmm", 128), own, [], 512)
    assert case_config(Case("lmm", 128), own, ["task=language", "train.stop_when=null"], 512).task == "language"


@pytest.mark.thorough
def test_a_refused_setting_is_the_reason_of_its_row(tmp_path):
    found = training.in_a_process(Case("lmm", 128), "configs/recall/{model}.yaml", [], 512)
    assert found.failure.startswith("task: given 'recall'")


def test_only_the_models_name_is_replaced_in_a_configs_path(tmp_path):
    (tmp_path / "{a}").mkdir()
    (tmp_path / "{a}" / "own-lmm.yaml").write_text("inherit: quickstart\ntrain: {lr: 0.5}\n")
    assert case_config(Case("lmm", 512), str(tmp_path / "{a}" / "own-{model}.yaml"), [], 2048).train.lr == 0.5


def test_lengths_must_divide_the_tokens(tmp_path, capsys):
    words = ["benchmark", "training", "--models", "lmm", "--lengths", "256,384", "--out", str(tmp_path / "out")]
    assert cli.run([*words, "--tokens", "512"]) == 2
    assert "--tokens: given 512; must be a multiple of 384" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["model.mixers=[lmm]", "train.micro_batch=2", "data={seq_len: 128}"])
def test_a_setting_of_the_cases_is_refused(word, tmp_path, capsys):
    assert cli.run(["benchmark", "training", word, "--out", str(tmp_path / "out")]) == 2
    assert ": given, but this command sets it; leave it out and give --" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_benchmark_without_any_figure_does_not_end_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "in_a_process", lambda case, *_: Measurement("lmm", 256, None, None, failure="why"))
    words = ["benchmark", "training", "--models", "lmm,mac", "--lengths", "256", "--tokens", "512"]
    assert cli.run([*words, "--config", SMALL, "--out", str(tmp_path)]) == 2
    assert "nothing was measured: all 2 rows failed; the first: why" in capsys.readouterr().err
    assert "why" in (tmp_path / "training.md").read_text()


@pytest.mark.parametrize(("given", "words"), [
    (Measurement("lmm", 4096, None, None, 10**6, 12345.6, 0.402, 900.0, {"matrix product": 0.6, "copy": 0.4}),
     "| lmm | 4,096 |  |  | 1,000,000 | 12,346 | 40.2 % | 900 | matrix product 60 %, copy 40 % |"),
    (Measurement("gla", 2048, 3, 16, failure="out of memory"), "| gla | 2,048 | 3 | 16 |  |  |  |  | out of memory |"),
])  # fmt: skip
def test_table(given, words):
    assert table([given]).splitlines()[-1] == words
