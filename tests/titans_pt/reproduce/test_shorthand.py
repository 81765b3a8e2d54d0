"""titans recall and titans needles: trained once, asked again, several seeds and models in one folder, one table."""

import json
from pathlib import Path

import pytest

from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.evaluation import long_context
from titans_pt.reproduce.order import Order, _parameters, equal_size
from titans_pt.reproduce.shorthand import models_of

NEEDLES, RECALL = "configs/needles.yaml", "configs/recall.yaml"
SMALL = [
    "model.d_model=16", "model.n_layers=1", "model.window=8", "model.memory.chunk_size=8", "model.mac.segment=8",
    "model.mac.memory_tokens=8", "train.max_steps=2", "train.warmup_steps=1", "train.eval_every=1",
    "train.eval_samples=2",
]  # fmt: skip
NOISE = ["model.vocab_size=64", "data.seq_len=64", "train.batch_tokens=128", "train.micro_batch=2"]
ASKED = ["needles.needles=2", "needles.lengths=32:2,64", "--asked", "32", "--answers", "6"]


pytestmark = pytest.mark.usefixtures("one_group")


def needles(folder, *more):
    words = ["needles", NEEDLES, f"run.dir={folder}", *SMALL, *NOISE, "needles.held_out=4", *ASKED, "--models", "lmm"]
    return cli.run([*words, *more])


def records(folder):
    return {path.stem: json.loads(path.read_text()) for path in (folder / "records").iterdir()}


@pytest.mark.thorough
def test_what_was_trained_is_asked_again_and_not_trained_again(tmp_path, capsys):
    assert needles(tmp_path) == 0
    (trained,) = records(tmp_path).values()
    assert trained["name"] == "lmm-s0" and trained["measured"]["needles"]["asked"][0]["by_length"][0]["n"] == 6
    assert trained["trained"]["figures"]["accuracy"][-1][0] == 2 * 128
    capsys.readouterr()
    assert needles(tmp_path) == 0 and "steps" not in capsys.readouterr().out
    assert needles(tmp_path, "--asked", "32,128", "--asked-needles", "2,4") == 0
    assert needles(tmp_path, "--noise", "unseen") == 0
    record = records(tmp_path)["lmm-s0"]
    assert record["trained"] == trained["trained"]
    assert list(record["measured"]) == ["needles", "needles-2-4", "needles-unseen"]
    asked = [(row["noise"], row["needles"], [cell["length"] for cell in row["by_length"]])
             for result in record["measured"].values() for row in result["asked"]]  # fmt: skip
    assert asked == [("seen", 2, [32]), ("seen", 2, [32, 128]), ("seen", 4, [32, 128]), ("unseen", 2, [32])]
    assert {path.name for path in tmp_path.glob("needles-*.png")} == {
        "needles-training.png", "needles-2-seen.png", "needles-4-seen.png", "needles-2-unseen.png"
    }  # fmt: skip
    assert needles(tmp_path, "--asked", "64") == 0, "a later question stands beside the earlier one"
    measured = records(tmp_path)["lmm-s0"]["measured"]["needles"]
    assert [cell["length"] for cell in measured["asked"][0]["by_length"]] == [32, 64]
    assert needles(tmp_path, "train.lr=1e-3") == 2
    assert "train.lr=0.003, asked for is 0.001; choose another" in capsys.readouterr().err


@pytest.mark.thorough
def test_models_and_seeds_share_a_table(tmp_path):
    assert needles(tmp_path, "--models", "swa,gla+lmm") == 0
    assert needles(tmp_path, "run.seed=1", "--models", "swa") == 0
    assert sorted(records(tmp_path)) == ["gla+lmm-s0", "swa-s0", "swa-s1"]
    assert records(tmp_path)["gla+lmm-s0"]["config"]["model"]["mixers"] == ["gla", "lmm"]
    assert "| sliding window |" in (tmp_path / "needles.md").read_text()


@pytest.mark.thorough
def test_a_killed_reading_goes_on(tmp_path, monkeypatch, capsys):
    """A kill loses at most the samples read together, and of a long sample the tokens after the last save."""
    more = ["--asked", "100", "--answers", "20", "evaluation.save_every=40", "evaluation.prefill_tokens=16"]
    assert needles(tmp_path / "whole", *more) == 0
    calls, read_prompt = [], long_context.read_prompt

    class Killed(BaseException):
        pass

    def dies(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 5:  # the second stretch of samples 9 to 16
            raise Killed
        return read_prompt(*arguments, **named)

    monkeypatch.setattr(long_context, "read_prompt", dies)
    with pytest.raises(Killed):
        needles(tmp_path / "cut", *more)
    folder = tmp_path / "cut/runs/lmm-s0/evaluation"
    assert len(list(folder.glob("reading*"))) == 1
    capsys.readouterr()
    assert needles(tmp_path / "cut", *more) == 0 and len(calls) == 5 + 2
    assert "needles: 80 of 100 tokens" in capsys.readouterr().out and not list(folder.glob("reading*"))
    whole, cut = (records(tmp_path / name)["lmm-s0"]["measured"]["needles"] for name in ("whole", "cut"))
    assert whole == cut and whole["asked"][0]["by_length"][0]["n"] == 20


@pytest.mark.thorough
def test_recall_is_trained_with_and_without_memory(tmp_path, capsys):
    words = ["recall", RECALL, *SMALL, "train.batch_tokens=160", "train.micro_batch=2", f"run.dir={tmp_path}",
             "evaluation.recall.sequences=4", "evaluation.recall.pairs=[2,16]", "evaluation.recall.distances=[8]",
             "model.vocab_size=16", "recall.pairs=4"]  # fmt: skip
    assert cli.run([*words, "--models", "lmm,swa"]) == 0
    found = records(tmp_path)
    assert sorted(found) == ["lmm-memory-off-s0", "lmm-s0", "swa-s0"]
    assert [row["pairs"] for row in found["lmm-s0"]["measured"]["recall"]["by_pairs"]] == [2], "16 keys there are not"
    assert found["lmm-memory-off-s0"]["config"]["model"]["memory"]["writes"] is False
    assert "LMM, memory off" in (tmp_path / "recall.md").read_text() and (tmp_path / "recall-accuracy.png").exists()
    for wrong, said in (
        (["--models", "gru"], "--models: given 'gru'"), (["--models", "lmm+gru"], "--models: given 'gru'"),
        (["--models", "gla", "--changes", "plain,no-ln"], "given 'no-ln', but gla has no Titan's memory"),
        (["--changes", "no-memory"], "--changes: given 'no-memory'; allowed: plain, depth-1"),
        (["recall.pairs=8"], "recall.pairs: given 8; below 8"),
    ):  # fmt: skip
        assert cli.run([*words, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_what_cannot_be_asked_is_refused_before_training(tmp_path, capsys):
    for words, said in (
        (["--models", "gru"], "--models: given 'gru'; allowed:"),
        (["--asked", "1024,0"], "given '1024,0'; allowed: whole numbers of at least 1"),
        (["--asked", "32", "--asked-needles", "8"], "evaluation.needles.lengths: given 32"),
        (["--noise", "unseen", "needles.held_out=0"], "evaluation.needles.noise: given 'unseen'"),
        (["train.batch_tokens=32"], "train.batch_tokens: given 32"),
        (["evaluation.needles.answers=9"], "evaluation.needles.answers: given, but this command sets it; leave it out"),
        (["model.mixers=[mac]"], "model.mixers: given beside --models"),
    ):
        assert needles(tmp_path, *words) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("command", "config"), [("recall", "needles"), ("needles", "quickstart"), ("needles", RECALL)])
def test_a_config_of_another_task_is_refused_before_training(tmp_path, capsys, command, config):
    assert cli.run([command, config, f"run.dir={tmp_path / 'out'}"]) == 2
    assert f"name a config with task={command}, such as {command}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_without_a_memory_have_as_many_parameters_as_the_largest_with_one():
    def size(model):
        return _parameters(load_config(NEEDLES, equal_size(NEEDLES, model, ())))

    largest = max(map(size, ("lmm", "mac", "mag", "mal")))
    assert largest <= size("swa") < 1.01 * largest
    for path in (Path(NEEDLES).parent / "needles").glob("*.yaml"):
        assert _parameters(load_config(path)) == pytest.approx(largest, rel=0.01), path


def test_a_config_of_one_model_is_about_it():
    assert models_of(load_config(RECALL)) == []
    assert models_of(load_config("configs/recall/transformer.yaml")) == ["attention"]
    assert models_of(load_config("configs/recall/samba.yaml")) == ["mamba+swa"]
    assert Order(Path("out")).config is None
