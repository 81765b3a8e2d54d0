import pytest

from titans_pt.config import TrainConfig
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.training.schedule import learning_rate


def lr(step, warmup=10, steps=110, ratio=0.1, **others):
    return learning_rate(step, TrainConfig(lr=2.0, warmup_steps=warmup, max_steps=steps, min_lr_ratio=ratio, **others))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "halving"])
def test_warms_up_linearly_to_the_peak(schedule):
    assert [lr(s, schedule=schedule) for s in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


def test_falls_along_a_half_cosine_to_the_floor():
    assert lr(60) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert lr(110) == pytest.approx(0.2)
    assert lr(500) == pytest.approx(0.2)
    assert all(lr(s) > lr(s + 1) for s in range(10, 110))


def test_no_warm_up_starts_near_the_peak():
    assert 1.99 < lr(1, warmup=0) < 2.0


def test_ratio_one_is_constant():
    assert lr(80, ratio=1.0) == pytest.approx(2.0)


def test_falls_linearly():
    assert [lr(s, schedule="linear") for s in (35, 60, 110, 500)] == pytest.approx([1.55, 1.1, 0.2, 0.2])


def test_stays_and_then_decays():
    assert [lr(s, schedule="wsd") for s in (11, 50, 99)] == [2.0, 2.0, 2.0]
    found = [lr(s, schedule="wsd", decay_steps=20) for s in (90, 95, 100, 110, 500)]
    assert found == pytest.approx([2.0, 1.55, 1.1, 0.2, 0.2])
    assert lr(105, schedule="wsd") == pytest.approx(2.0 * (0.1 + 0.9 * 5 / 11))
    assert [lr(s, schedule="wsd", steps=1000) for s in (50, 99, 900)] == [2.0, 2.0, 2.0]


def test_halves_every_epoch():
    found = [lr(s, schedule="halving", warmup=0, decay_steps=20, ratio=0.2) for s in (1, 20, 21, 40, 41, 500)]
    assert found == [2.0, 2.0, 1.0, 1.0, 0.5, 0.4]
    assert [lr(s, schedule="halving", warmup=10, decay_steps=20) for s in (10, 30, 31)] == [2.0, 2.0, 1.0]


@pytest.mark.parametrize(("words", "message"), [
    (["train.decay_steps=5"], "train.decay_steps: given 5; only with train.schedule=wsd or halving, not with cosine"),
    (["train.schedule=wsd", "train.decay_steps=9"], "train.decay_steps: given 9; at most .* = 8"),
])  # fmt: skip
def test_settings_that_do_not_go_together(tiny, words, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny(), words)
