"""The dual form against the definition, in PyTorch operators and in C: outputs, final state and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.memory.calls import (
    DUAL,
    Call,
    assert_cuts_are_invisible,
    calls,
    compare,
    make,
)
from titans_pt.kernels.memory import MemoryState, neural_memory


@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_chunked_equals_naive(call: Call):
    compare(call.tensors, call.depth, **call.options)


@pytest.mark.parametrize("T", [63, 100])
@pytest.mark.parametrize("C", [16, 70])
def test_ragged_lengths(T, C):
    compare(make(2, T, 2, 4, 8, 2, extremes=True, seed=T), 2, chunk_size=C)


@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize(("C", "T"), [(1, 70), (5, 130), (8, 150), (16, 150)])
def test_short_chunks_cut_by_documents(C, T, forget_to):
    tensors = make(2, T, 1, 8, 12, 2, per_layer=True, seed=C)
    tensors[5] = 0.05 * tensors[5]  # a memory that forgets everything is ill-conditioned
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[0, [3, 64]] = reset[1, 20] = True
    start = [[0.3 * torch.ones_like(w).expand(2, *w.shape) for w in tensors[6:8]] for _ in range(3)]
    initial = (*start, torch.tensor([C // 2, 0]))
    compare(tensors, 2, ["chunked"], chunk_size=C, forget_to=forget_to, reset=reset, initial=initial, save_every=2)


@pytest.mark.parametrize("forget_to", ["start", "zero"])
def test_block_smaller_than_gradient_chunk(forget_to):
    compare(make(1, 150, 1, 4, 8, 2, seed=3), 2, chunk_size=140, forget_to=forget_to)


@pytest.mark.parametrize("backend", DUAL)
@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize("depth", [1, 2])
def test_gradcheck(depth, forget_to, backend):
    tensors = [t.requires_grad_() for t in make(1, 5, 1, 2, 3, depth, seed=depth)]

    def function(*leaves):
        weights, norm = leaves[6 : 6 + depth], leaves[6 + depth :]
        out, state = neural_memory(
            *leaves[:6], weights, norm=norm, chunk_size=2, forget_to=forget_to, output_final_state=True,
            backend=backend,
        )  # fmt: skip
        return out, *state.weights, *state.momentum

    assert torch.autograd.gradcheck(function, tensors)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 39), max_size=4, unique=True), C=st.sampled_from([1, 4, 16, 64]),
       depth=st.integers(1, 3), resets=st.booleans(), forget_to=st.sampled_from(["start", "zero"]),
       backend=st.sampled_from(["naive", *DUAL]))  # fmt: skip
def test_cuts_are_invisible(cuts, C, depth, resets, forget_to, backend):
    assert_cuts_are_invisible(
        make(2, 40, 2, 4, 6, depth, seed=C), depth, cuts, resets, chunk_size=C, forget_to=forget_to, backend=backend
    )


@pytest.mark.parametrize("backend", ["naive", *DUAL])
def test_where_forgetting_leads(backend):
    """Without writes, alpha = 1 reaches the start or zero at once; alpha = 1/2 halves the distance with each token."""
    tensors = make(1, 3, 2, 4, 6, 2)
    (q, k, v, theta, eta, _), weights, norm = tensors[:6], tuple(tensors[6:8]), tuple(tensors[8:])
    other = tuple(w[None] + 1 for w in weights)
    state = MemoryState(other, tuple(torch.zeros_like(w) for w in other), other, torch.zeros(1, dtype=torch.int64))
    for forget_to, alpha, expected in [("start", 1.0, 1), ("start", 0.5, 1.125), ("zero", 1.0, 0), ("zero", 0.5, None)]:
        _, end = neural_memory(
            q, k, v, 0 * theta, eta, torch.full_like(eta, alpha), weights, norm=norm, chunk_size=2, backend=backend,
            forget_to=forget_to, initial_state=state, output_final_state=True,
        )  # fmt: skip
        for w, first, w0 in zip(end.weights, other, weights, strict=True):
            want = first / 8 if expected is None else w0[None] + (expected - 1) if expected else 0 * first
            torch.testing.assert_close(w, want, rtol=0, atol=1e-14)


def test_resets_may_be_on_another_device():
    """The definition on meta tensors; an observer computes the resets of a cached memory on the CPU."""
    *tensors, weight, gain, shift = (x.to("meta") for x in make(2, 6, 1, 4, 4, 1))
    start = weight.expand(2, *weight.shape)
    state = MemoryState((start,), (start,), (start,), torch.zeros(2, dtype=torch.int64, device="meta"))
    out, _ = neural_memory(
        *tensors, (weight,), norm=(gain, shift), chunk_size=4, initial_state=state,
        reset=torch.zeros(2, 6, dtype=torch.bool), backend="naive",
    )  # fmt: skip
    assert out.is_meta
