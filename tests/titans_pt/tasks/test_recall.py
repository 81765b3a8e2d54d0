"""Multi-query associative recall: samples keep their promises, impossible ones are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.evaluation.recall import RecallAnswers
from titans_pt.models import build_model
from titans_pt.reproduce.study import VARIANTS
from titans_pt.tasks import task_of
from titans_pt.tasks.answers import EVALUATION_SEED, VALIDATION_SEED, stacked
from titans_pt.tasks.recall import FILLER, MQAR

CONFIG = "configs/recall.yaml"


@st.composite
def questions(draw):
    pairs, distance, room = draw(st.integers(1, 12)), draw(st.integers(0, 50)), draw(st.integers(0, 40))
    vocabulary = draw(st.integers(2 * pairs + 2, 100))
    return MQAR(vocabulary, 4 * pairs + distance + room, pairs, distance)


@settings(max_examples=100, deadline=None)
@given(questions(), st.integers(0, 2**32), st.integers(0, 2**40))
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


def test_samples_differ_and_stacks_are_samples():
    task = MQAR()
    ids, places = stacked(task, 3, 10, 4)
    for row in range(4):
        one, where = task.sample(3, 10 + row)
        assert np.array_equal(ids[row], one)
        assert np.array_equal(places[row], where)
    assert len({tuple(row.tolist()) for row in ids}) == 4
    assert not torch.equal(ids, stacked(task, 4, 10, 4)[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recall.pairs=300"], "recall.pairs: given 300; below 256: model.vocab_size=512 has 255 keys"),
        (["recall.distance=60"], "data.seq_len: given 80; at least 92: 8 pairs at distance 60"),
        (["recall.length=60"], "recall.length: given 60; at least 72"),
        (["recall.length=100"], "recall.length: given 100; at most data.seq_len=80"),
    ],
)
def test_impossible_samples_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        load_config(CONFIG, words)


def test_every_answer_of_an_evaluation_counts_once():
    """The trained number of pairs and distance occur twice: as in training, and among other numbers."""
    config = load_config(CONFIG, ["recall.distance=40", "evaluation.recall.distances=[8,40,40]"])
    suite = RecallAnswers(SimpleNamespace(task=task_of(config), identity="x"), config)
    assert len(set(suite.keys)) == len(suite.keys)
    records = [{"by": by, "value": value, "right": 0, "answers": rows * questions.pairs}
               for by, value, questions, first, rows in suite.jobs]  # fmt: skip
    found = suite.summary(records)
    assert found["n"] == 512 * 8
    assert [row["pairs"] for row in found["by_pairs"]] == [2, 4, 8, 16]
    assert [row["distance"] for row in found["by_distance"]] == [8, 40]
    assert "values known, keys not: 34.0 %" in suite.table(found)


@pytest.mark.parametrize("seed", [VALIDATION_SEED, EVALUATION_SEED])
def test_no_training_draws_the_samples_of_validation_or_evaluation(seed):
    with pytest.raises(UserError, match=f"run.seed: given {seed}, with which the samples of validation or evaluation"):
        task_of(load_config(CONFIG, [f"run.seed={seed}"])).open()


def test_what_ends_a_training_is_not_what_is_reported():
    task = task_of(load_config(CONFIG))
    ids, _, _ = task.open().validation.sample(0)
    asked, _ = stacked(task.mqar, EVALUATION_SEED, 0, 1)
    assert not np.array_equal(ids[: asked.shape[1]], asked[0].numpy())


@torch.no_grad()
@pytest.mark.parametrize("name", ["lmm", "mac", "mag", "mal"])
def test_a_memory_that_is_off_sees_nothing_of_the_pairs(name):
    """The answer's logits do not depend on the pairs; with the memory on they do. Both have equally many parameters."""
    ids, places = stacked(MQAR(), 0, 0, 2)
    other = ids.clone()
    other[:, :16] = stacked(MQAR(), 1, 0, 2)[0][:, :16]
    sizes = set()
    for variant, same in (("", False), ("memory-off", True)):
        torch.manual_seed(0)
        model = build_model(load_config(CONFIG, [f"model.mixers=[{name}]", *VARIANTS[variant]]).model)
        sizes.add(sum(p.numel() for p in model.parameters()))
        row = torch.arange(2)[:, None]
        assert torch.equal(model(ids)[0][row, places], model(other)[0][row, places]) == same
    assert len(sizes) == 1
