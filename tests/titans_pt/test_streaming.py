"""Streaming in pieces, and tokens out of a state."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.mixers import EVERY, small_model
from tests.helpers.stand_ins import Recurrent, Scripted
from titans_pt import streaming
from titans_pt.config import ModelConfig
from titans_pt.layers.state import state_bytes
from titans_pt.models import build_model

RECURRENT = Recurrent().eval()


@given(length=st.integers(1, 40), piece=st.integers(1, 50))
@settings(max_examples=25, deadline=None)
def test_prefill_in_pieces_equals_one_call(length, piece):
    ids = torch.arange(length)[None] * 37 % 128
    whole, end = RECURRENT(ids)
    logits, state = streaming.prefill(RECURRENT, ids, piece)
    torch.testing.assert_close(logits, whole[:, -1].detach())
    torch.testing.assert_close(state.ids, end.ids.detach())


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "attention", "swa"])
def test_prefill_of_the_project_models(mixer):
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(
            mixers=[mixer],
            vocab_size=50,
            d_model=16,
            n_layers=2,
            n_heads=2,
            window=8,
            segment=16,
            memory_tokens=4,
            persistent_tokens=2,
        )  # fmt: skip
    ).eval()
    ids = torch.randint(50, (1, 45))
    with torch.no_grad():
        whole, _ = model(ids)
    logits, state = streaming.prefill(model, ids, 13)
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-4, atol=1e-5)
    # Continued by hand: the state after 30 tokens, then the rest.
    _, state = streaming.prefill(model, ids[:, :30], 7)
    logits, _ = streaming.prefill(model, ids[:, 30:], 64, state)
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-4, atol=1e-5)


def test_prefill_keeps_only_the_last_logits(recurrent):
    seen = []
    recurrent.register_forward_hook(lambda module, args, output: seen.append((args[0].shape[1], output[0].shape[1])))
    _, state = streaming.prefill(recurrent, torch.zeros(1, 25, dtype=torch.int32), 10)
    assert seen == [(10, 1), (10, 1), (5, 1)]
    assert state_bytes(state) == 16 * 4 and not state.ids.requires_grad


def test_prefill_refuses_nothing(recurrent):
    with pytest.raises(ValueError, match="ids"):
        streaming.prefill(recurrent, torch.zeros(1, 0, dtype=torch.int64), 4)


def test_prefill_refuses_starts_of_fewer_tokens(recurrent):
    """It would read only as many pieces as the starts have."""
    ids, reset = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"reset: given shape \(1, 4\); must be that of ids, \(1, 8\)"):
        streaming.prefill(recurrent, ids, 4, reset=reset)


def test_greedy_takes_the_most_likely_and_is_reproducible(recurrent):
    ids = torch.tensor([[3, 1, 4]])
    first, second = (list(streaming.greedy(recurrent, *streaming.prefill(recurrent, ids, 2), 12)) for _ in range(2))
    assert first == second and len(first) == 12
    with torch.no_grad():
        for token in first:
            assert token == int(recurrent(ids)[0][0, -1].argmax())
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_stops_before_a_stop_id_and_at_the_limit():
    counting = Scripted(lambda text: chr(ord(text[-1]) + 1))
    start = streaming.prefill(counting, torch.tensor([list(b"a")]), 1)
    assert list(streaming.greedy(counting, *start, 3)) == list(b"bcd")
    assert list(streaming.greedy(counting, *start, 10, {ord("e")})) == list(b"bcd")
    reads = counting.reads
    assert list(streaming.greedy(counting, *start, 1)) == list(b"b")
    assert counting.reads == reads  # the last token is not read: no token follows


def test_sampling_is_a_function_of_the_seed(recurrent):
    start = streaming.prefill(recurrent, torch.tensor([[5]]), 1)

    def drawn(seed, temperature=1.0, **more):
        choose = streaming.Sampling(temperature, seed=seed, **more).chooser()
        return list(streaming.continuation(recurrent, *start, 20, (), choose))

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, temperature=0.0) == list(streaming.greedy(recurrent, *start, 20)) == drawn(1, top_p=1e-9)


def test_draws_follow_temperature_top_k_and_top_p():
    p = torch.tensor([0.1, 0.5, 0.0, 0.4])
    generator = torch.Generator().manual_seed(0)

    def count(temperature=1.0, top_k=None, top_p=1.0):
        drawn = [streaming.draw(p.log(), temperature, top_k, top_p, generator) for _ in range(2000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 2000

    torch.testing.assert_close(count(temperature=1.0, top_p=1.0), p, atol=0.04, rtol=0)
    sharp = p**2 / (p**2).sum()
    torch.testing.assert_close(count(temperature=0.5, top_p=1.0), sharp, atol=0.04, rtol=0)
    two = torch.tensor([0, 5 / 9, 0, 4 / 9])
    torch.testing.assert_close(count(top_k=2), two, atol=0.04, rtol=0)
    assert count(temperature=1e-310).tolist() == [0, 1, 0, 0]
    # Of the two, the first alone holds 5 / 9.
    assert count(top_k=2, top_p=0.55).tolist() == [0, 1, 0, 0]
    # 0.5 does not reach 0.6, 0.5 + 0.4 does: these two stay.
    torch.testing.assert_close(count(temperature=1.0, top_p=0.6), torch.tensor([0, 5 / 9, 0, 4 / 9]), atol=0.04, rtol=0)


def test_devices(monkeypatch, recurrent):
    assert streaming.device_of(recurrent).type == "cpu" == streaming.device_of(Scripted(chr)).type
    monkeypatch.setattr(streaming.torch, "cuda", SimpleNamespace(is_available=lambda: True, device_count=lambda: 2))
    assert [streaming.best_device(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setattr(streaming.torch, "cuda", SimpleNamespace(is_available=lambda: False))
    assert streaming.best_device(1) == "cpu"


@pytest.mark.parametrize("mixer", EVERY)
def test_prompts_of_different_lengths_are_continued_as_if_alone(mixer):
    torch.manual_seed(0)
    model = small_model([mixer], init_std=0.5)
    prompts = [torch.randint(50, (length,)).tolist() for length in (5, 33, 1, 20)]
    ids, reset = streaming.padded(prompts)
    logits, state = streaming.prefill(model, ids, 13, None, reset)
    found = streaming.continuations(model, logits, state, 25, {7}, [streaming.most_likely] * 4)
    for row, prompt in enumerate(prompts):
        alone, state = streaming.prefill(model, torch.tensor([prompt]), 64)
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-9, atol=1e-9)
        assert found[row] == list(streaming.greedy(model, alone, state, 25, {7}))


def test_a_row_that_has_ended_leaves_the_others_alone(recurrent):
    start = streaming.prefill(recurrent, torch.ones(2, 3, dtype=torch.int64), 8)
    scripts = [iter([1, 2, 0, 9]), iter([5, 6, 7, 8, 0])]
    choose = [lambda logits, script=script: next(script) for script in scripts]
    assert streaming.continuations(recurrent, *start, 4, {0}, choose) == [[1, 2], [5, 6, 7, 8]]
    assert next(scripts[0]) == 9  # not asked again


def test_padded_refuses_an_empty_prompt():
    with pytest.raises(ValueError, match="prompts"):
        streaming.padded([[1], []])
