"""Needles: a control of equal size, training and asking that are separate, both go on after a kill, one command."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titans_pt import cli
from titans_pt.config import ModelConfig
from titans_pt.config_file import load_config
from titans_pt.errors import UserError
from titans_pt.evaluation import long_context
from titans_pt.experiments import needles as it
from titans_pt.experiments import study
from titans_pt.experiments.needles_in_noise import Curriculum, NeedlesInNoise
from titans_pt.experiments.study import models_of
from titans_pt.models import build_model

CONFIG = str(Path(__file__).parents[3] / "configs" / "needles.yaml")
SMALL = ["model.d_model=16", "model.vocab_size=64", "model.n_layers=1", "train.batch_tokens=64", "train.max_steps=2",
         "train.warmup_steps=1", "data.seq_len=32"]  # fmt: skip


class Killed(Exception):
    pass


def test_models_without_a_memory_have_as_many_parameters_as_the_largest_with_one():
    base = load_config(CONFIG).model
    largest = max(it.parameters(it.sized(base, model)) for model in ("lmm", "mac", "mag", "mal"))
    assert largest <= it.parameters(it.sized(base, "swa")) < 1.01 * largest
    for path in (Path(CONFIG).parent / "needles").glob("*.yaml"):
        own = load_config(path)
        (model,) = models_of(own)
        assert it.parameters(it.sized(own.model, model)) == pytest.approx(largest, rel=0.01), path


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "swa"])
def test_asking_in_pieces_is_one_call(mixer, tmp_path):
    torch.manual_seed(0)
    model = build_model(ModelConfig(
        mixers=[mixer], vocab_size=64, d_model=16, n_layers=1, n_heads=2, window=8, segment=8, memory_tokens=4,
        persistent_tokens=2, init_std=0.5, memory={"chunk_size": 4, "depth": 1},
    ))  # fmt: skip
    task = NeedlesInNoise(64, 50, 2)
    expected = study.answers(model, *task.batch(study.EVALUATION_SEED, 3, 4))[1].sum(1).tolist()
    config = load_config(CONFIG, ["evaluation.prefill_tokens=7", "evaluation.save_every=14"])
    rows = it.answer(model, task, 3, 4, config, tmp_path / "state", "model")
    assert [row["right"] for row in rows] == expected and [row["index"] for row in rows] == [3, 4, 5, 6]
    assert not list(tmp_path.iterdir())


def run(folder, *more, seed=0):
    words = ["needles", CONFIG, f"run.dir={folder}", f"run.seed={seed}", *SMALL, "--models", "lmm", "--needles", "2",
             "--lengths", "32:2,64", "--asked", "32", "--answers", "6"]  # fmt: skip
    return cli.run([*words, *more])


def lines(folder, kind, name="lmm-seed0.jsonl"):
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_what_was_trained_is_asked_again_and_not_trained_again(tmp_path, capsys):
    held_out = ["--held-out", "4"]
    assert run(tmp_path, *held_out, "--models", "lmm,swa") == 0
    weights = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    assert len(weights) == 2
    assert [row["index"] for row in lines(tmp_path, "asked")] == [0, 1, 2]
    assert run(tmp_path, *held_out, "--asked", "32,128", "--asked-needles", "2,4", "--answers", "8") == 0
    assert run(tmp_path, *held_out, "--noise", "unseen") == 0
    assert "LMM, seed 0: trained already" in capsys.readouterr().out
    asked = [(row["noise"], row["needles"], row["length"], row["index"]) for row in lines(tmp_path, "asked")]
    assert asked == [
        *(("seen", 2, 32, index) for index in (0, 1, 2, 3)), *(("seen", 2, 128, index) for index in range(4)),
        *(("seen", 4, length, index) for length in (32, 128) for index in range(2)),
        *(("unseen", 2, 32, index) for index in range(3)),
    ]  # fmt: skip
    assert len(lines(tmp_path, "trained")) == 1
    assert weights == {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "needles-2-seen.png", "needles-4-seen.png", "needles-2-unseen.png"
    }  # fmt: skip
    text = (tmp_path / "needles.md").read_text()
    assert text.count("| LMM |") == 3 and text.count("| SWA |") == 1 and "| 32 | 128 |" in text

    assert run(tmp_path, *held_out, "train.lr=1e-3") == 0  # another training
    assert len(lines(tmp_path, "trained")) == 2 and len(list(tmp_path.glob("lmm*.safetensors"))) == 2
    assert not list(tmp_path.glob("*.training")) and not list(tmp_path.glob("reading*"))


def test_a_setting_that_came_later_is_no_other_training(tmp_path):
    """Records of before it existed stand for what was done then."""
    assert run(tmp_path) == 0
    path = tmp_path / "lmm-seed0.jsonl"
    first, *rest = map(json.loads, path.read_text().splitlines())
    del first["config"]["model"]["memory"]["per_layer_gates"], first["config"]["model"]["init_std"]
    path.write_text("".join(json.dumps(line) + "\n" for line in [first, *rest]))
    config = load_config(CONFIG, [f"run.dir={tmp_path}", *SMALL])
    said = config, "lmm", NeedlesInNoise(64, 32, 2), Curriculum("32:2,64"), 0.0
    assert it.find(path, *said) is None  # init_std is not the default there
    first["config"]["model"]["init_std"] = config.model.init_std
    path.write_text(json.dumps(first) + "\n")
    assert it.find(path, *said)["key"] == first["key"]
    assert it.find(path, *said[:2], replace(said[2], held_out=4), *said[3:]) is None
    assert it.find(path, *said[:-1], 0.1) is None


def test_weights_that_are_not_theirs(tmp_path, capsys):
    assert run(tmp_path) == 0
    weights, = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert run(tmp_path) == 0  # nothing is asked
    assert run(tmp_path, "--asked", "64") == 2
    assert f"{weights}: not the weights of LMM, seed 0, or not there" in capsys.readouterr().err


def test_what_is_written_costs_where_answers_are_right(tmp_path, monkeypatch):
    written, answers, shares = study.written, study.answers, []

    @contextmanager
    def noted(model):
        with written(model) as found:
            yield found
        shares.append(float(torch.cat(found).mean().detach()))

    monkeypatch.setattr(study, "written", noted)
    losses = {}
    for cost, right in (("0", 1.0), ("10", 0.0), ("10", 1.0)):
        monkeypatch.setattr(study, "answers", lambda *told, right=right: (answers(*told)[0], torch.tensor([right])))
        more = ["train.max_steps=8", "train.lr=0.01", "--answers", "1", "--lengths", "64"]
        monkeypatch.setattr(it, "ask", lambda *told: None)
        monkeypatch.setattr(it, "summarise", lambda *told: None)
        assert run(tmp_path / f"{cost} {right}", "--write-cost", cost, *more) == 0
        losses[cost, right] = lines(tmp_path / f"{cost} {right}", "trained")[0]["curve"][-1][1]
    free, wrong, dear = shares[:8], shares[8:16], shares[16:]
    assert free == wrong and free[0] == dear[0] and dear[7] < free[7] - 0.01
    assert all(0 < share < 1 for share in shares)
    assert losses["10", 1.0] == pytest.approx(losses["0", 1.0], abs=0.2)  # that of the answers alone


def test_a_training_without_finite_gradients_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "REPORT_EVERY", 2)
    calls, answers = [], study.answers

    def overflows(*arguments):
        calls.append(arguments)
        loss, right = answers(*arguments)
        return (loss * float("nan") if len(calls) in {1, 5, 6} else loss), right

    monkeypatch.setattr(study, "answers", overflows)
    monkeypatch.setattr(it, "ask", lambda *told: None)
    assert run(tmp_path, "train.max_steps=10") == 0
    assert len(calls) == 6 and lines(tmp_path, "trained")[0]["steps"] == 6
    assert "no gradient of the last 2 steps was finite" in capsys.readouterr().out


def test_a_killed_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "REPORT_EVERY", 2)
    more = ["train.max_steps=6", "--answers", "1"]
    assert run(tmp_path / "whole", *more) == 0
    calls, answers = [], study.answers

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise Killed
        return answers(*arguments)

    monkeypatch.setattr(study, "answers", dies)
    with pytest.raises(Killed):
        run(tmp_path / "cut", *more)
    assert run(tmp_path / "cut", *more) == 0 and len(calls) == 6 + 2
    both = [lines(tmp_path / name, "trained")[0] for name in ("whole", "cut")]
    for record in both:
        assert [row[0] for row in record["curve"]] == [2, 4, 6] and not list(tmp_path.glob("*/*.training"))
    assert both[0]["curve"] == both[1]["curve"] and both[0]["sha256"] == both[1]["sha256"]


def test_a_killed_reading_goes_on(tmp_path, monkeypatch, capsys):
    """At most the samples that are read together are lost; of a long one what came after the last save."""
    more = ["--asked", "100", "--answers", "20", "evaluation.save_every=40", "evaluation.prefill_tokens=16"]
    assert run(tmp_path / "whole", *more) == 0
    calls, prefill = [], long_context.prefill

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 5:  # the second stretch of the second eight samples
            raise Killed
        return prefill(*arguments)

    monkeypatch.setattr(long_context, "prefill", dies)
    with pytest.raises(Killed):
        run(tmp_path / "cut", *more)
    assert len(lines(tmp_path / "cut", "asked")) == 8 and len(list((tmp_path / "cut").glob("reading*"))) == 1
    capsys.readouterr()
    assert run(tmp_path / "cut", *more) == 0 and len(calls) == 5 + 2
    assert "LMM, seed 0: 80 of 100 tokens" in capsys.readouterr().out
    both = [[row["right"] for row in lines(tmp_path / name, "asked")] for name in ("whole", "cut")]
    assert both[0] == both[1] and len(both[0]) == 10 and not list((tmp_path / "cut").glob("reading*"))


def test_several_seeds_are_one_line():
    told = {"length": 64, "needles": 4, "parameters": 10}
    asked = ("lmm", 0, 4), ("lmm", 0, 2), ("lmm", 1, 4), ("lmm", 1, 4), ("swa", 0, 0)
    rows = [told | {"model": model, "seed": seed, "right": right} for model, seed, right in asked]
    lmm, swa = it.by_model(rows)
    assert lmm["seeds"] == [0, 1] and lmm["by_length"][0]["each"] == [0.75, 1.0] and lmm["by_length"][0]["n"] == 16
    assert lmm["by_length"][0]["low"] < 14 / 16 == lmm["by_length"][0]["mean"] < lmm["by_length"][0]["high"] < 1
    assert "| LMM | 10 | 0, 1 | 87.5 (75.0 to 100.0) |" in it.table([lmm, swa])
    assert "| SWA | 10 | 0 | 0.0 |" in it.table([lmm, swa])


def test_what_cannot_be_asked(tmp_path, capsys):
    for words, said in (
        (["--models", "gru"], "--models: given 'gru'; allowed:"),
        (["--asked", "1024,0"], "given '1024,0'; allowed: whole numbers of at least 1"),
        (["--asked", "32", "--asked-needles", "8"], "--needles: given 8"),
        (["--noise", "unseen"], "train with --held-out N"),
        (["train.batch_tokens=32"], "train.batch_tokens: given 32; a sample has 64 tokens"),
    ):
        assert run(tmp_path, *words) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_broken_record(tmp_path):
    path = tmp_path / "lmm-seed0.jsonl"
    path.write_text("{}\n")
    with pytest.raises(UserError, match="line 1 is not a record"):
        it.summarise(tmp_path)
