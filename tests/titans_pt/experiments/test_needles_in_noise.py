"""Needles in noise: samples that are what they say, and the lengths of training."""

import numpy as np
import pytest

from titans_pt.errors import UserError
from titans_pt.experiments import needles_in_noise as it


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


def test_held_out_noise():
    quarter, held = 16, {60, 61, 62, 63}
    whole = {*range(2, quarter), *range(3 * quarter, 64)}
    drawn = {name: set() for name in ("all", "seen", "unseen")}
    for index in range(20):
        for name, more in (("all", {}), ("seen", {"held_out": 4}), ("unseen", {"held_out": 4, "unseen": True})):
            ids = it.NeedlesInNoise(64, 200, 4, **more).sample(1, index)[0]
            drawn[name] |= set(ids.tolist()) & whole
    assert drawn == {"all": whole, "seen": whole - held, "unseen": held}
    with pytest.raises(UserError, match="--held-out: given 16; allowed: less than 16"):
        it.NeedlesInNoise(64, 200, 4, held_out=16)
    with pytest.raises(UserError, match="--noise: given 'unseen'; training drew every noise token"):
        it.NeedlesInNoise(64, 200, 4, unseen=True)


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
