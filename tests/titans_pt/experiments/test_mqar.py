"""Multi-query associative recall: samples that are what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.errors import UserError
from titans_pt.experiments.mqar import FILLER, MQAR


@st.composite
def tasks(draw):
    pairs, distance, room = draw(st.integers(1, 12)), draw(st.integers(0, 50)), draw(st.integers(0, 40))
    vocabulary = draw(st.integers(2 * pairs + 2, 100))
    return MQAR(vocabulary, 4 * pairs + distance + room, pairs, distance)


@settings(max_examples=100, deadline=None)
@given(tasks(), st.integers(0, 2**32), st.integers(0, 2**40))
def test_sample(task, seed, index):
    ids, places = task.sample(seed, index)
    again, _ = task.sample(seed, index)
    assert np.array_equal(ids, again)
    assert ids.shape == (task.length,)
    keys, values = ids[0 : 2 * task.pairs : 2], ids[1 : 2 * task.pairs : 2]
    half = task.vocabulary // 2
    assert len(set(keys)) == len(set(values)) == task.pairs
    assert (keys != FILLER).all()
    assert (keys < half).all()
    assert (values >= half).all()
    assert (values < task.vocabulary).all()
    assert places[0] >= 2 * task.pairs + task.distance
    assert places[-1] + 1 < task.length
    assert (np.diff(places) >= 2).all(), "queries overlap"
    pairs = dict(zip(keys, values, strict=True))
    assert {ids[p]: ids[p + 1] for p in places} == pairs, "every key is asked once, its own value stands behind it"
    rest = np.delete(ids, np.concatenate([np.arange(2 * task.pairs), places, places + 1]))
    assert (rest == FILLER).all()


def test_samples_differ_and_batches_are_samples():
    task = MQAR()
    ids, places = task.batch(3, 10, 4)
    for row in range(4):
        one, where = task.sample(3, 10 + row)
        assert np.array_equal(ids[row], one)
        assert np.array_equal(places[row], where)
    assert len({tuple(row.tolist()) for row in ids}) == 4
    assert not torch.equal(ids, task.batch(4, 10, 4)[0])


@pytest.mark.parametrize(("changes", "word"), [({"pairs": 300}, "pairs"), ({"length": 60}, "data.seq_len")])
def test_impossible_tasks_are_told(changes, word):
    with pytest.raises(UserError, match=word):
        MQAR(**changes)
