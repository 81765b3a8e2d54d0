"""The recall experiment: the control, a run of three steps, and (slow) that LMM learns."""

import json

import pytest
import torch

from titans_pt import cli
from titans_pt.config_file import load_config
from titans_pt.experiments import recall, study
from titans_pt.experiments.mqar import MQAR
from titans_pt.models import build_model

CONFIG = "configs/recall.yaml"
TINY = [
    "model.d_model=16", "model.memory.chunk_size=8", "model.segment=8", "model.memory_tokens=8", "model.window=8",
    "data.seq_len=80", "train.batch_tokens=160", "train.max_steps=3", "train.warmup_steps=1",
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ["lmm", "mac", "mag", "mal"])
def test_memory_off_sees_nothing_of_the_pairs(name):
    """The answer's logits do not depend on the pairs; with the memory on they do. Equally many parameters."""
    base = load_config(CONFIG).model
    ids, places = MQAR().batch(0, 0, 2)
    other = ids.clone()
    other[:, :16] = MQAR().batch(1, 0, 2)[0][:, :16]
    sizes = set()
    for change, same in (("", False), ("memory off", True)):
        torch.manual_seed(0)
        model = build_model(recall.Variant(name, change).config(base))
        sizes.add(sum(p.numel() for p in model.parameters()))
        row = torch.arange(2)[:, None]
        assert torch.equal(model(ids)[0][row, places], model(other)[0][row, places]) == same
    assert len(sizes) == 1


def test_memory_off_leaves_every_parameter_a_gradient():
    torch.manual_seed(0)
    model = build_model(recall.Variant("lmm", "memory off").config(load_config(CONFIG).model))
    study.answers(model, *MQAR().batch(0, 0, 2))[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_command_resumes(tmp_path, capsys, monkeypatch):
    for name, small in {"PAIRS": (2, 4), "DISTANCES": (8, 16), "EVALUATION_ROWS": 2, "EVALUATION_BATCHES": 1}.items():
        monkeypatch.setattr(recall, name, small)
    words = ["recall", CONFIG, *TINY, f"run.dir={tmp_path}", "--models", "lmm,mag", "--pairs", "4"]
    assert cli.run(words) == 0
    assert "LMM, memory off, seed 0: step 3" in capsys.readouterr().out
    files = sorted(path.name for path in tmp_path.iterdir())
    variants = [f"{name}-seed0.jsonl" for name in ("lmm-memory-off", "lmm", "mag-memory-off", "mag")]
    assert files == sorted([*variants, "recall.md", "recall.png"])
    before = [(tmp_path / name).read_bytes() for name in variants]
    record = json.loads((tmp_path / "lmm-seed0.jsonl").read_bytes())
    assert record["steps"] == 3
    assert record["curve"][0][0] == 3
    assert len((tmp_path / "recall.md").read_text().splitlines()) == 2 + len(variants)

    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert out.count("there already") == 4
    assert ": step" not in out
    assert [(tmp_path / name).read_bytes() for name in variants] == before

    assert cli.run([*words, "train.lr=1e-3", "--models", "lmm"]) == 0
    assert ": step 3" in capsys.readouterr().out, "other settings are another result"

    assert cli.run([*words, "run.seed=1", "--models", "mag", "--changes", "plain"]) == 0
    assert "MAG, seed 1: step 3" in capsys.readouterr().out, "another seed is another training, of the same line"
    assert len((tmp_path / "recall.md").read_text().splitlines()) == 2 + len(variants)


def test_seeds_share_a_line():
    def record(seed: int, accuracy: float, *rights: float) -> dict:
        curve = [[50 * (n + 1), 0.0, right, 0.0] for n, right in enumerate(rights)]
        return {"model": "lmm", "change": "", "seed": seed, "accuracy": accuracy, "curve": curve, "parameters": 1234,
                "steps": 50 * len(rights), "max_steps": 1000}  # fmt: skip

    lines = recall.table(
        [
            [record(0, 0.96, 0.5, 0.95), record(2, 0.42, 0.1, 0.2, 0.4)],
            [record(0, 0.5, 0.5)],
            [record(0, 1.0, 1.0), record(1, 1.0, 1.0)],
        ]
    )
    assert lines.splitlines()[2:] == [
        "| LMM | 0, 2 | 69.0 (42.0 to 96.0) | 100, - | 100, 150 of 1,000 | 1,234 |",
        "| LMM | 0 | 50.0 | - | 50 of 1,000 | 1,234 |",
        "| LMM | 0, 1 | 100.0 | 50, 50 | 50, 50 of 1,000 | 1,234 |",
    ]


def test_a_record_without_a_seed_is_told_before_training(tmp_path, capsys):
    (tmp_path / "lmm.jsonl").write_text('{"key": "0", "model": "lmm", "change": "", "steps": 3}\n')
    assert cli.run(["recall", CONFIG, *TINY, f"run.dir={tmp_path}", "--models", "lmm"]) == 2
    told = capsys.readouterr()
    assert f"{tmp_path / 'lmm.jsonl'}: written before records had seeds; move it away" in told.err
    assert "step 3" not in told.out


def test_a_small_vocabulary_is_asked_for_as_many_pairs_as_it_has(tmp_path, monkeypatch):
    """Five minutes of training were lost when 16 pairs did not fit."""
    for name, small in {"PAIRS": (2, 16), "DISTANCES": (8,), "EVALUATION_ROWS": 2, "EVALUATION_BATCHES": 1}.items():
        monkeypatch.setattr(recall, name, small)
    words = ["recall", CONFIG, *TINY, "model.vocab_size=16", f"run.dir={tmp_path}", "--models", "lmm", "--pairs", "4"]
    assert cli.run([*words, "--changes", "plain"]) == 0
    assert [n for n, _ in json.loads((tmp_path / "lmm-seed0.jsonl").read_text())["by_pairs"]] == [2]


def test_what_is_trained_unless_it_is_said():
    """A config of one mixer is about it; what has no memory is not trained a second time without it."""
    assert [v.name for v in recall.chosen(["lmm", "gla"])] == ["LMM", "GLA", "LMM, memory off"]
    assert study.models_of(load_config(CONFIG)) == []
    assert study.models_of(load_config("configs/recall/transformer.yaml")) == ["attention"]
    assert study.models_of(load_config("configs/recall/samba.yaml")) == ["mamba+swa"]
    assert [v.name for v in recall.chosen(["swa+lmm", "mamba+swa"])] == ["SWA+LMM", "MAMBA+SWA", "SWA+LMM, memory off"]


def test_mixers_in_turns_are_one_model(tmp_path, monkeypatch):
    for name, small in {"PAIRS": (2,), "DISTANCES": (8,), "EVALUATION_ROWS": 2, "EVALUATION_BATCHES": 1}.items():
        monkeypatch.setattr(recall, name, small)
    words = ["recall", CONFIG, *TINY, f"run.dir={tmp_path}", "--models", "gla+lmm", "--changes", "plain"]
    assert cli.run(words) == 0
    record = json.loads((tmp_path / "gla+lmm-seed0.jsonl").read_text())
    assert (record["model"], record["settings"]["mixers"]) == ("gla+lmm", ["gla", "lmm"])
    assert "| GLA+LMM | 0 |" in (tmp_path / "recall.md").read_text()


def test_what_has_no_memory_cannot_lose_it(tmp_path, capsys):
    words = ["recall", "configs/recall/deltanet.yaml", f"run.dir={tmp_path}", "--changes", "plain,no-ln"]
    assert cli.run(words) == 2
    assert "--changes: given 'no-ln', but deltanet has none of a Titan's memory" in capsys.readouterr().err


def test_unknown_model_is_told(tmp_path, capsys):
    assert cli.run(["recall", CONFIG, f"run.dir={tmp_path}", "--models", "gru"]) == 2
    assert "--models: given 'gru'" in capsys.readouterr().err
    assert cli.run(["recall", CONFIG, f"run.dir={tmp_path}", "--models", "lmm+gru"]) == 2
    assert "--models: given 'gru'" in capsys.readouterr().err


def test_unknown_change_is_told(tmp_path, capsys):
    assert cli.run(["recall", CONFIG, f"run.dir={tmp_path}", "--changes", "no-memory"]) == 2
    assert "--changes: given 'no-memory'; allowed: plain, memory-off" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_lmm_learns(tmp_path):
    config = load_config(CONFIG, [f"run.dir={tmp_path}"])
    record = recall.train(config, recall.Variant("lmm"), MQAR())
    assert record["accuracy"] >= 0.95
