"""Finite spikes: which losses count as spikes, and that skipping one changes nothing, also with a resume."""

import math
from contextlib import nullcontext

import pytest

from tests.helpers.trainings import spoil_logits
from titans_pt.config import TrainConfig
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics
from titans_pt.training import loop
from titans_pt.training.spikes import SpikeGuard


def guard(losses=(), deviations=3.0, numbers=None):
    made = SpikeGuard(TrainConfig(spike_deviations=deviations, spike_window=4), numbers or {})
    for loss in losses:
        made.note(loss)
    return made


def test_the_limit_is_that_of_the_running_mean_and_deviation():
    assert guard([1.0, 2.0, 3.0]).limit == math.inf
    assert guard([1.0, 2.0, 3.0, 4.0]).limit == pytest.approx(2.5 + 3.0 * math.sqrt(1.25))
    assert guard([1.0, 2.0, 3.0, 4.0], deviations=None).limit == math.inf


def test_the_numbers_continue_exactly():
    losses = [3.0, 2.7, 2.9, 2.5, 2.61, 9.0, 2.4]
    first = guard(losses[:5])
    assert guard(losses[5:], numbers=first.numbers()).numbers() == guard(losses).numbers()


def test_one_spike_hardly_moves_the_limit_and_a_level_that_stays_is_accepted():
    calm = [2.0, 2.1, 1.9, 2.0] * 3
    assert guard([*calm, 1000.0]).limit < 4.0
    made = guard(calm)
    skipped = 0
    while made.limit < 8.0:
        made.note(8.0)
        skipped += 1
    assert 1 < skipped < 20


@pytest.fixture
def trained(tiny, tmp_path, ranks, monkeypatch):
    """``trained(name, spikes, overrides)`` trains a run whose logits are a thousandfold in the steps ``spikes``."""
    spoilt = spoil_logits(monkeypatch, 1e3)
    monkeypatch.setattr(loop, "process_group", lambda timeout: nullcontext(ranks))
    path = tiny(train={"spike_deviations": 4.0, "spike_window": 3, "keep_last": 99})

    def run(name: str, spikes: tuple[int, ...], *overrides: str):
        spoilt.clear()
        spoilt.update(spikes)
        assert loop.train(load_config(path, [f"run.dir={tmp_path / name}", *overrides])) == 0
        return tmp_path / name

    return run


def records(folder, *kinds):
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] in kinds]


def tensors(folder, step):
    path = checkpoints.checkpoint_path(folder / "checkpoints", step)
    return [(path / name).read_bytes() for name in (checkpoints.MODEL, checkpoints.OPTIMIZER)]


@pytest.mark.thorough
def test_a_spike_is_skipped_and_logged_and_a_resume_decides_the_same(trained, capsys):
    whole = trained("whole", (6,), "train.checkpoint_every=1")
    (spike,) = records(whole, "spike")
    assert (spike["step"], spike["positions"], spike["skipped"]) == (6, [20, 23], 1)
    assert spike["loss"] > spike["limit"] > records(whole, "train")[4]["loss"]
    assert [sample["position"] for sample in spike["samples"]] == [20, 21, 22, 23]
    assert tensors(whole, 6) == tensors(whole, 5)
    assert tensors(whole, 7) != tensors(whole, 6)
    state = checkpoints.read_state(checkpoints.find(whole / "checkpoints"))
    assert (state.nonfinite, state.adam_step, state.spikes["steps"]) == (0, 9, 10)
    assert "its loss" in capsys.readouterr().err

    for stop in (5, 10):
        parts = trained("parts", (6,), f"train.stop_at={stop}")
    losses, expected = ([(r["step"], r["loss"]) for r in records(run, "train")] for run in (parts, whole))
    assert losses == expected
    assert tensors(parts, 10) == tensors(whole, 10)


def test_off_by_default(trained):
    run = trained("off", (6,), "train.spike_deviations=null")
    assert records(run, "spike") == []
    assert len(records(run, "train")) == 10


@pytest.mark.parametrize("window", [2, 3, 100])
def test_deviations_with_which_a_new_level_would_never_be_accepted_are_refused(tiny, window):
    least = math.sqrt(window / (window - 1))
    words = [f"train.spike_window={window}", f"train.spike_deviations={least}"]
    with pytest.raises(
        UserError, match=f"train.spike_deviations: given .*; must be above .* train.spike_window={window}"
    ):
        load_config(tiny(), words)
    settings = TrainConfig(spike_deviations=1.05 * least, spike_window=window)
    made, skipped = SpikeGuard(settings, {}), 0
    for n in range(2 * window):
        made.note(2.0 + 0.1 * (n % 2))
    calm = made.skipped
    while made.limit < 8.0 and skipped < 100_000:
        made.note(8.0)
        skipped += 1
    assert made.limit >= 8.0 and made.skipped == calm + skipped


def test_equal_losses_forbid_none():
    assert guard([2.0] * 8).limit == math.inf
