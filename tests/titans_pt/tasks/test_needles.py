"""Needles in noise: samples keep their promises, their lengths grow with the position, impossible ones are refused."""

import numpy as np
import pytest

from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.tasks import TASKS
from titans_pt.tasks.needles import ASK, MARK, NeedlesInNoise

CONFIG = "configs/needles.yaml"


@pytest.mark.parametrize("length", [24, 25, 200])
def test_samples(length):
    task = NeedlesInNoise(64, length, 4)
    for index in range(50):
        ids, places = task.sample(1, index)
        assert len(ids) == length and ids.min() >= 0 and ids.max() < 64
        marks, asks = np.flatnonzero(ids == MARK), np.flatnonzero(ids == ASK)
        assert len(marks) == len(asks) == 4
        assert asks.tolist() == [length - 12, length - 9, length - 6, length - 3] and (places == asks + 1).all()
        told = {ids[i + 1]: ids[i + 2] for i in marks}
        assert len(told) == 4 and {ids[i + 1]: ids[i + 2] for i in asks} == told
        assert all(16 <= k < 32 <= v < 48 for k, v in told.items())
        assert ((ids >= 16) & (ids < 48)).sum() == 16
    assert np.array_equal(task.sample(1, 3)[0], task.sample(1, 3)[0])
    assert not np.array_equal(task.sample(1, 3)[0], task.sample(2, 3)[0])


def test_needles_stand_everywhere():
    task = NeedlesInNoise(64, 112, 1)
    found = {int(np.flatnonzero(task.sample(0, i)[0] == MARK)[0]) for i in range(2000)}
    assert found == set(range(107))


def test_held_out_noise():
    quarter, held = 16, {60, 61, 62, 63}
    whole = {*range(2, quarter), *range(3 * quarter, 64)}
    drawn = {name: set() for name in ("all", "seen", "unseen")}
    for index in range(20):
        for name, more in (("all", {}), ("seen", {"held_out": 4}), ("unseen", {"held_out": 4, "unseen": True})):
            ids = NeedlesInNoise(64, 200, 4, **more).sample(1, index)[0]
            drawn[name] |= set(ids.tolist()) & whole
    assert drawn == {"all": whole, "seen": whole - held, "unseen": held}


def test_lengths_grow_with_the_position_and_validation_has_the_last():
    words = ["needles.lengths='96:3,256'", "data.seq_len=512", "train.batch_tokens=1024", "train.max_steps=80"]
    task = TASKS.find("needles")(load_config(CONFIG, words))
    lengths = [task.questions(position).length for position in range(2 * 80)]
    assert lengths == [96] * 2 * 60 + [256] * 2 * 20, "two rows a step; three of four parts are short"
    assert task.questions(10**6).length == task.questions(None).length == 256
    other = TASKS.find("needles")(load_config(CONFIG, [*words, "train.batch_tokens=2048"]))
    other.begins = 100, 50  # a run continued after 50 steps with twice the batch, four rows a step
    lengths = [other.questions(position).length for position in range(100, 100 + 4 * 30)]
    assert lengths == [96] * 4 * 10 + [256] * 4 * 20
    data = task.open()
    for position, length in ((0, 96), (150, 256)):
        ids, reset, asked = data.train.sample(position)
        assert ids.shape == (513,) and reset.shape == asked.shape == (512,)
        assert np.flatnonzero(reset).tolist() == list(range(0, 512, length))
        assert asked.sum() == 8 * (512 // length)
        own, places = task.questions(position).sample(0, position * (512 // length) + 1)
        assert np.array_equal(ids[length : 2 * length], own)
        assert np.flatnonzero(asked[length : 2 * length]).tolist() == places.tolist()
    assert not np.array_equal(data.train.sample(150)[0], data.validation.sample(150)[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["needles.needles=20"], "needles.needles: given 20; at most 16: .* the shortest sample .96 tokens. holds 16"),
        (["model.vocab_size=7"], "model.vocab_size: given 7; signs, keys, values and noise need at least 8"),
        (["needles.held_out=64"], "needles.held_out: given 64; below 64, a quarter of model.vocab_size=256"),
        (["needles.lengths='96,4096'"], "needles.lengths: .*; set data.seq_len=4096"),
        *(([f"needles.lengths='{text}'"], "needles.lengths: given") for text in ("", "96:", "96:0", "0", "96,,256")),
    ],
)
def test_impossible_samples_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        load_config(CONFIG, words)
