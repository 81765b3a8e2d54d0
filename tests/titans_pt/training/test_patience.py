"""train.patience: the run ends when validation no longer improves, and its best checkpoint is the one that counts."""

import math
import shutil

import pytest

from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.runs import checkpoints
from titans_pt.runs.loaded import load_run
from titans_pt.runs.metrics import read_metrics
from titans_pt.training import loop
from titans_pt.training.patience import Patience

pytestmark = pytest.mark.usefixtures("one_group")


def test_it_counts_validations_since_the_best():
    patience = Patience(2, {})
    found = []
    for step, loss in enumerate([math.nan, 3.0, 3.0, 2.9, math.nan, 2.9], 1):
        patience.note(step, loss)
        patience.note(step, 0.0)  # a second note of the same step does not count
        found.append((patience.best.step, patience.best.since, patience.exhausted))
    assert found == [(1, 0, False), (2, 0, False), (2, 1, False), (4, 0, False), (4, 1, False), (4, 2, True)]
    again = Patience(3, patience.numbers())
    assert again.best == patience.best and not again.exhausted
    assert Patience(None, patience.numbers()).numbers() == {}


@pytest.fixture
def go(tiny, tmp_path, monkeypatch):
    """``go(name, overrides)`` trains 14 steps; every second one has a validation with a given loss."""
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 1.0, 12: 1.0, 14: 1.0}
    given = loop.Trainer._note_validation

    def note(self, figures, step):
        figures["validation_loss"] = losses.get(step, 0.0)
        given(self, figures, step)

    monkeypatch.setattr(loop.Trainer, "_note_validation", note)
    train = {"max_steps": 14, "eval_every": 2, "patience": 2, "checkpoint_every": 3, "keep_last": 1}
    config = tiny(train=train)
    return lambda name, *words: loop.train(load_config(config, [f"run.dir={tmp_path / name}", *words]))


def steps(run):
    return [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(run / "checkpoints")]


@pytest.mark.thorough
def test_a_run_ends_and_keeps_its_best_checkpoint(go, tmp_path, monkeypatch, capsys):
    assert go("whole") == 0
    run = tmp_path / "whole"
    assert "ended by train.patience=2; the best validation loss is 2.0000, of step 4" in capsys.readouterr().out
    assert steps(run) == [4, 8], "the best, and the newest: train.keep_last=1"
    assert load_run(run).step == 4 and load_run(run, step=8).step == 8
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "1"]) == 0
    assert steps(run) == [4, 8]
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [2, 4, 6, 8]

    # Stopped between validations, at one, and by a signal before one: it ends as without stops, bit for bit.
    signals = iter([0, 15])
    for stop in ("train.stop_at=5", "train.stop_at=6", "", ""):
        monkeypatch.setattr(loop.StopSignals, "decide", lambda self, sums: 0 if stop else next(signals, 0))  # noqa: B023
        go("parts", *filter(None, [stop]))
    for step in (4, 8):
        one, other = (checkpoints.checkpoint_path(tmp_path / name / "checkpoints", step) / checkpoints.MODEL
                      for name in ("whole", "parts"))  # fmt: skip
        assert one.read_bytes() == other.read_bytes()
    parts = read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert [row["step"] for row in parts if row["kind"] == "validation"] == [2, 4, 5, 6, 8]

    # With more patience the run continues from its end, to a better checkpoint.
    assert go("whole", "train.patience=3") == 0
    assert load_run(run).step == 10 and steps(run) == [10, 14]
    # The best checkpoint is gone: a warning, and the newest one is loaded.
    shutil.rmtree(checkpoints.checkpoint_path(run / "checkpoints", 10))
    assert load_run(run).step == 14


def test_a_validation_between_two_stops_counts(go, tmp_path, monkeypatch):
    """Stop at a validation, which the next process makes and logs; then kill that one before its next checkpoint."""
    signals = iter([0, 0, 0, 15])
    monkeypatch.setattr(loop.StopSignals, "decide", lambda self, sums: next(signals, 0))
    assert go("run") == 128 + 15
    with monkeypatch.context() as killed:
        killed.setattr(loop.Trainer, "_train_step", lambda self: (_ for _ in ()).throw(MemoryError("killed")))
        with pytest.raises(MemoryError):
            go("run")
    assert go("run") == 0
    assert steps(tmp_path / "run") == [4, 8] and load_run(tmp_path / "run").step == 4


@pytest.mark.parametrize("setting", ["patience=2", "stop_when=loss <= 3"])
def test_they_need_validations(tiny, setting):
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=f"train.{key}: given .*; only with train.eval_every above 0"):
        load_config(tiny(train={"eval_every": 0}), [f"train.{setting}"])


def test_the_end_of_a_part_is_no_validation_that_ends_the_run(go, tmp_path):
    words = ["train.patience=null", "train.stop_when=loss <= 2"]
    assert go("run", *words, "train.stop_at=3") == 0  # the run has no validation at step 3; here it is 0.0
    assert go("run", *words) == 0
    assert load_run(tmp_path / "run").step == 4


def test_a_stop_at_the_last_step_leaves_the_best_one_right(go, tmp_path, monkeypatch):
    """The last validation comes after the stop's checkpoint, whose step it makes the best one."""
    signals = iter([*[0] * 9, 15])
    monkeypatch.setattr(loop.StopSignals, "decide", lambda self, sums: next(signals, 0))
    words = ["train.max_steps=10", "train.patience=5"]
    assert go("run", *words) == 128 + 15
    assert go("run", *words) == 0
    run = load_run(tmp_path / "run")
    assert run.step == 10 and checkpoints.verify(checkpoints.find(tmp_path / "run" / "checkpoints")) == []


def test_losses_of_another_validation_do_not_count(go, tmp_path, caplog):
    words = ["train.patience=9", "train.max_steps=8"]
    assert go("run", *words, "train.stop_at=4") == 0
    assert go("run", *words, "train.eval_samples=1") == 0
    assert "the validation is another one than before (train.eval_samples" in caplog.text
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [2, 4, 4, 6, 8]


def test_a_best_checkpoint_that_is_gone_does_not_count(go, tmp_path, caplog):
    """train.resume=STEP names a checkpoint whose best one has been deleted since."""
    words = ["train.patience=9", "train.max_steps=8", "train.keep_last=9"]
    assert go("run", *words) == 0
    shutil.rmtree(checkpoints.checkpoint_path(tmp_path / "run" / "checkpoints", 4))
    assert go("run", *words, "train.resume=6", "train.lr=1e-5") == 0
    assert "the checkpoint of the best validation, of step 4, is gone; it counts from step 6 on" in caplog.text
    assert load_run(tmp_path / "run").step == 8
