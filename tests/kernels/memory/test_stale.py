"""The memory that is read as it was at its chunk's start, against the definition: outputs, final state, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.memory.test_chunked import TOLERANCE, assert_cuts_are_invisible, compare, make
from titans_pt.kernels.memory import NetworkShape, memory_read, native, neural_memory
from titans_pt.kernels.memory.chunked import MAX_BLOCK

NATIVE = native.unserved(torch.zeros(1), NetworkShape(4, 4)) is None


@settings(max_examples=25, deadline=None)
@given(
    B=st.integers(1, 3), T=st.sampled_from([1, 2, 17, 33, 150]), H=st.integers(1, 2), D=st.sampled_from([4, 8]),
    hidden=st.sampled_from([5, 8]), depth=st.integers(1, 4), C=st.sampled_from([1, 5, 16, 70, 200]),
    per_layer=st.booleans(), extremes=st.booleans(), norm=st.booleans(), residual=st.booleans(),
    activation=st.sampled_from(["gelu", "silu", "relu"]), forget_to=st.sampled_from(["start", "zero"]),
    resets=st.booleans(), initial=st.booleans(), save_every=st.sampled_from([None, 1, 3]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_equals_the_definition(
    B, T, H, D, hidden, depth, C, per_layer, extremes, norm, residual, activation, forget_to, resets, initial,
    save_every, seed,
):  # fmt: skip
    norm = norm or depth > 1 or T > 33  # without it such memories diverge, by definition
    tensors = make(B, T, H, D, hidden, depth, per_layer=per_layer, extremes=extremes, norm=norm, seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    network = NetworkShape(D, hidden, depth, norm, residual, activation)
    options = dict(network=network, chunk_size=C, forget_to=forget_to, save_every=save_every, stale=True)
    if resets:
        options["reset"] = torch.rand(B, T, generator=gen) < 0.1
    if initial:
        start = [
            [0.3 * torch.randn(B, *w.shape, generator=gen, dtype=w.dtype) for w in tensors[6 : 6 + depth]]
            for _ in range(3)
        ]
        options["initial"] = (*start, torch.randint(0, C, (B,), generator=gen))
    compare(tensors, depth, ["chunked", "native"] if C <= MAX_BLOCK and NATIVE else ["chunked"], **options)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_a_chunk_reads_what_was_there_before_it(backend):
    tensors = make(2, 24, 2, 4, 6, 2)
    weights, norm = tuple(tensors[6:8]), tuple(tensors[8:])
    options = dict(norm=norm, chunk_size=8, backend=backend, stale=True, output_final_state=True)
    out, _ = neural_memory(*tensors[:6], weights, **options)
    q = tensors[0]
    for begin in (0, 8, 16):
        if begin:
            _, state = neural_memory(*(x[:, :begin] for x in tensors[:6]), weights, **options)
            seen = state.weights
        else:
            seen = tuple(w.expand(2, *w.shape) for w in weights)
        found = memory_read(q[:, begin : begin + 8], seen, norm=norm)
        torch.testing.assert_close(out[:, begin : begin + 8], found, rtol=0, atol=TOLERANCE)


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 39), max_size=4, unique=True), C=st.sampled_from([1, 4, 16, 64]),
       depth=st.integers(1, 3), resets=st.booleans(), forget_to=st.sampled_from(["start", "zero"]))  # fmt: skip
def test_cuts_are_invisible(cuts, C, depth, resets, forget_to):
    tensors = make(2, 40, 2, 4, 6, depth, seed=C)
    assert_cuts_are_invisible(tensors, depth, cuts, resets, chunk_size=C, forget_to=forget_to, stale=True)


@pytest.mark.parametrize("backend, device", [("triton", "meta"), ("native", "cpu")])
def test_other_kernels_refuse_it_in_one_line(backend, device):
    tensors = [x.float().to(device) for x in make(1, 3, 2, 16, 32, 2)]
    with pytest.raises(ValueError, match=f'"{backend}" does not serve this: tokens read the memory of their chunk'):
        neural_memory(
            *tensors[:6], tuple(tensors[6:8]), norm=tuple(tensors[8:]), backend=backend, stale=True, chunk_size=128
        )
