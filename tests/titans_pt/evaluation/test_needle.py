"""Needle samples are pure, exact and filled to the brim; the score tells a model that copies from one that does not."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.errors import UserError
from titans_pt.evaluation import needle
from titans_pt.evaluation.stream import prefill
from titans_pt.evaluation.words import ADJECTIVES, KEYS, NOUNS

from .conftest import Characters, OverLines, Recurrent, Scripted, copies

NEW = 10


def check(tokenizer, length, depth, index):
    """What every sample must be, by its text alone."""
    sample = needle.make_sample(tokenizer, length, depth, index, seed=0, max_new_tokens=NEW)
    at = int(sample.units * depth / 100)
    lines = needle.prompt_lines(sample.units, at, sample.key, sample.value)
    ids = tokenizer.encode("\n".join(lines))
    assert sample.ids.tolist() == ids and sample.ids.dtype == torch.int64
    assert len(ids) + NEW <= length

    more = needle.prompt_lines(sample.units + 1, int((sample.units + 1) * depth / 100), sample.key, sample.value)
    assert len(tokenizer.encode("\n".join(more))) + NEW > length

    text = tokenizer.decode(ids)
    line = f"One of the special magic numbers for {sample.key} is: {sample.value}."
    assert text.count(sample.value) == text.count(line) == 1
    assert text.split("\n").index(line) - 1 == at
    assert text.count("Here we go.") == sample.units
    assert sample.depth_tokens == len(tokenizer.encode("\n".join(lines[: at + 1])))
    assert tokenizer.decode(sample.answer_ids).strip() == sample.value
    assert text + tokenizer.decode(sample.answer_ids) == tokenizer.decode(ids + sample.answer_ids)
    assert re.fullmatch(r"[1-9]\d{6}", sample.value) and sample.key in KEYS
    return sample


COORDINATES = {
    "length": st.integers(500, 3000),
    "depth": st.sampled_from([0, 10, 25, 33.3, 50, 99, 100]),
    "index": st.integers(0, 99),
}


@given(**COORDINATES)
@settings(max_examples=60, deadline=None)
def test_samples_of_characters(length, depth, index):
    check(Characters(), length, depth, index)


@given(**COORDINATES)
@settings(max_examples=15, deadline=None)
def test_samples_of_a_tokenizer_that_merges_over_lines(length, depth, index):
    tokenizer = OverLines()
    assert not needle.LineTokens(tokenizer, KEYS[0], "1234567").exact
    check(tokenizer, length, depth, index)


def test_samples_of_the_project_tokenizer(sentencepiece):
    assert needle.LineTokens(sentencepiece, KEYS[0], "1234567").exact

    @given(**COORDINATES)
    @settings(max_examples=40, deadline=None)
    def samples(length, depth, index):
        check(sentencepiece, length, depth, index)

    samples()


def test_long_samples_are_joined_from_lines():
    encoded = 0

    class Counting(Characters):
        def encode(self, text):
            nonlocal encoded
            encoded += len(text)
            return super().encode(text)

    sample = needle.make_sample(Counting(), 2_000_000, 50, 0, 0, NEW)
    assert 2_000_000 - NEW - 90 < len(sample.ids) <= 2_000_000 - NEW
    assert encoded < 20_000


def test_a_sample_is_a_function_of_its_coordinates():
    def drawn(length=900, depth=50, index=0, seed=0, sha="a"):
        tokenizer = Characters()
        tokenizer.sha256 = sha
        sample = needle.make_sample(tokenizer, length, depth, index, seed, NEW)
        return sample.key, sample.value

    assert drawn() == drawn() == drawn(depth=50.0)
    others = [drawn(length=901), drawn(depth=51), drawn(index=1), drawn(seed=1), drawn(sha="b")]
    assert len({drawn(), *others}) == 6
    # Pinned: results of one version must be those of the next.
    assert drawn() == ("lonely-nutmeg", "5287057")


def test_words():
    assert len(KEYS) == len(set(KEYS)) == len(ADJECTIVES) * len(NOUNS)
    assert all(re.fullmatch("[a-z]+", word) for word in [*ADJECTIVES, *NOUNS])
    assert not set(" ".join(KEYS).replace("-", " ").split()) & set(needle.NOISE.lower().split())


@pytest.mark.parametrize("tokenizer", [Characters(), OverLines()])
def test_a_length_without_room_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"evaluation\.needle\.lengths: given 200; .* at least (\d+)") as caught:
        needle.make_sample(tokenizer, 200, 50, 0, 0, NEW)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    with pytest.raises(UserError):
        needle.make_sample(tokenizer, 200, 50, 0, 0, least)
    assert least > 200


def test_answer_nll_is_that_of_the_whole_text(recurrent):
    prompt, answer = torch.randint(128, (1, 30)), [5, 6, 7, 8]
    logits, state = prefill(recurrent, prompt, 7)
    before = state.ids.clone()
    found = needle.answer_nll(recurrent, logits, state, answer)
    with torch.no_grad():
        whole, _ = recurrent(torch.cat([prompt, torch.tensor([answer])], dim=1))
    losses = -torch.log_softmax(whole[0, 29:-1], dim=-1)[range(4), answer]
    assert found == pytest.approx(float(losses.mean()), rel=1e-5)
    assert torch.equal(state.ids, before)
    assert needle.answer_nll(recurrent, logits, state, answer[:1]) == pytest.approx(float(losses[0]), rel=1e-5)


def evaluation(run, model):
    run.model = model
    return needle.Needle(run, run.config)


def test_a_model_that_copies_scores_100_percent(run):
    it = evaluation(run, Scripted(copies))
    records = [it.measure(i) for i in range(len(it.keys))]
    summary = it.summary(records)
    assert summary["mean"] == 1.0 and summary["n"] == 12 and len(summary["cells"]) == 6
    assert summary["answer_nll"] < 1e-6
    assert all(r["prediction"] == f" {r['expected']}" and r["score"] == 1 for r in records)
    assert all(r["tokens"] + NEW <= r["length"] for r in records)
    assert [row["length"] for row in summary["by_length"]] == [700, 900]
    assert summary["chance_nll"] == pytest.approx(math.log(9_000_000) / 8)
    assert "100 [34, 100] 2" in it.table(summary)


def test_a_constant_model_scores_0_percent(run):
    it = evaluation(run, Scripted(lambda text: "7"))
    summary = it.summary([it.measure(i) for i in range(len(it.keys))])
    assert summary["mean"] == 0.0 and summary["low"] == 0.0 and summary["high"] == pytest.approx(0.2425, abs=1e-4)
    assert summary["answer_nll"] > 10


def test_a_model_that_says_nothing(run):
    it = evaluation(run, Scripted(lambda text: "\0"))
    record = it.measure(0)
    assert record["prediction"] == "" and record["score"] == 0 and record["decode_tokens_per_s"] is None
    assert " - " in it.table(it.summary([record]))


def test_the_log_of_a_sample(run):
    torch.manual_seed(0)
    it = evaluation(run, Recurrent().eval())
    record = it.measure(5)
    assert (record["length"], record["depth"], record["index"]) == (700, 100.0, 1)
    assert record["state_bytes"] == 16 * 4
    assert record["peak_memory"] > 10 * 2**20
    assert record["prefill_tokens_per_s"] > 0 and record["decode_tokens_per_s"] > 0
    assert 0 < record["depth_tokens"] < record["tokens"]


def test_keys_tell_measurements_apart(run):
    keys = needle.Needle(run, run.config).keys
    assert len(set(keys)) == len(keys) == 12
    other = SimpleNamespace(tokenizer=run.tokenizer, checkpoint_hash="other")
    assert not set(keys) & set(needle.Needle(other, run.config).keys)
