"""Needles: samples that are what they say, a control of equal size, asking in pieces, one command for it all."""

from pathlib import Path

import numpy as np
import pytest
import torch

from titans_pt import cli
from titans_pt.config import ModelConfig
from titans_pt.config_file import load_config
from titans_pt.errors import UserError
from titans_pt.experiments import needles_in_noise as it
from titans_pt.experiments.recall import answers
from titans_pt.models import build_model

CONFIG = str(Path(__file__).parents[3] / "configs" / "needles.yaml")


@pytest.mark.parametrize("length", [24, 25, 200])
def test_samples(length):
    task = it.NeedlesInNoise(64, length, 4)
    for index in range(50):
        ids, places = task.sample(1, index)
        assert len(ids) == length and ids.min() >= 0 and ids.max() < 64
        marks, asks = np.flatnonzero(ids == it.MARK), np.flatnonzero(ids == it.ASK)
        assert len(marks) == len(asks) == 4
        assert asks.tolist() == [length - 12, length - 9, length - 6, length - 3] and (places == asks + 1).all()
        told = {ids[i + 1]: ids[i + 2] for i in marks}
        assert len(told) == 4 and {ids[i + 1]: ids[i + 2] for i in asks} == told
        assert all(16 <= k < 32 <= v < 48 for k, v in told.items())
        assert ((ids >= 16) & (ids < 48)).sum() == 16
    assert np.array_equal(task.sample(1, 3)[0], task.sample(1, 3)[0])
    assert not np.array_equal(task.sample(1, 3)[0], task.sample(2, 3)[0])


def test_needles_stand_everywhere():
    task = it.NeedlesInNoise(64, 112, 1)
    found = {int(np.flatnonzero(task.sample(0, i)[0] == it.MARK)[0]) for i in range(2000)}
    assert found == set(range(107))


def test_too_many_needles():
    with pytest.raises(UserError, match="--needles: given 20"):
        it.NeedlesInNoise(64, 1000, 20)


def test_curriculum():
    curriculum = it.Curriculum("96:3,256")
    assert [curriculum.length(step, 8) for step in range(8)] == [96] * 6 + [256] * 2
    assert curriculum.last_begins(8) == 6 and curriculum.lengths == [96, 256]
    for steps in range(4, 30):
        lengths = [curriculum.length(step, steps) for step in range(steps)]
        assert lengths[curriculum.last_begins(steps)] == 256 and lengths[curriculum.last_begins(steps) - 1] == 96
    for text in ("", "96:", "96:0", "0", "a", "96,,256", "96:1:2"):
        with pytest.raises(UserError, match="--lengths: given"):
            it.Curriculum(text)


def test_the_control_has_no_fewer_parameters():
    base = load_config(CONFIG).model
    size = {model: it.parameters(it.sized(base, model)) for model in ("lmm", "mac", "mag", "mal", "swa")}
    largest = max(count for model, count in size.items() if model != "swa")
    assert largest <= size["swa"] < 1.01 * largest


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "swa"])
def test_asking_in_pieces_is_one_call(mixer):
    torch.manual_seed(0)
    model = build_model(ModelConfig(
        mixers=[mixer], vocab_size=64, d_model=16, n_layers=1, n_heads=2, window=8, segment=8, memory_tokens=4,
        persistent_tokens=2, init_std=0.5, memory={"chunk_size": 4, "depth": 1},
    ))  # fmt: skip
    task = it.NeedlesInNoise(64, 50, 2)
    ids, places = task.batch(it.EVALUATION_SEED, 0, 4)
    expected = answers(model, ids, places)[1]
    row = it.ask(model, task, chunk_tokens=7, count=8)
    assert row["n"] == 8 and row["mean"] == float(expected.float().mean())


def test_one_command(tmp_path, capsys):
    small = ["model.d_model=16", "model.vocab_size=64", "model.n_layers=1", "train.batch_tokens=64",
             "train.max_steps=2", "train.warmup_steps=1", "data.seq_len=32"]  # fmt: skip
    words = ["needles", CONFIG, f"run.dir={tmp_path}", *small, "--models", "lmm,swa", "--needles", "2",
             "--lengths", "32:2,64", "--asked", "32,128"]  # fmt: skip
    assert cli.run(words) == 0
    assert (tmp_path / "needles.png").exists() and (tmp_path / "needles.md").read_text().count("| LMM") == 1
    assert cli.run(words) == 0
    assert "LMM: there already" in capsys.readouterr().out
    assert cli.run([*words, "--models", "gru"]) == 2
    capsys.readouterr()
    assert cli.run([*words, "train.lr=1e-3", "--asked", "1024,8"]) == 2  # another result: it would be trained
    began = capsys.readouterr()
    assert "--needles: given 2" in began.err and "8 tokens hold at most 1" in began.err and "step" not in began.out
    assert cli.run([*words, "model.vocab_size=7"]) == 2
    assert "model.vocab_size: given 7" in capsys.readouterr().err
    assert cli.run([*words, "--asked", "1024,0"]) == 2
    assert "given '1024,0'; allowed: whole numbers of at least 1" in capsys.readouterr().err
