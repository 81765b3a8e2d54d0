import pytest

from titans_pt.training.schedule import learning_rate


def lr(step, warmup=10, steps=110, ratio=0.1):
    return learning_rate(step, 2.0, warmup, steps, ratio)


def test_warms_up_linearly_to_the_peak():
    assert [lr(s) for s in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


def test_falls_along_a_half_cosine_to_the_floor():
    assert lr(60) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert lr(110) == pytest.approx(0.2)
    assert lr(500) == pytest.approx(0.2)
    assert all(lr(s) > lr(s + 1) for s in range(10, 110))


def test_no_warm_up_starts_near_the_peak():
    assert 1.99 < lr(1, warmup=0) < 2.0


def test_ratio_one_is_constant():
    assert lr(80, ratio=1.0) == pytest.approx(2.0)
