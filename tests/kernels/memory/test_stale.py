"""Reads of the memory as of its chunk's start, against the definition: outputs, final state, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.memory.calls import TOLERANCE, Call, assert_cuts_are_invisible, calls, compare, make
from titans_pt.kernels.memory import NetworkShape, memory_read, native, neural_memory
from titans_pt.kernels.memory.chunked import MAX_BLOCK

NATIVE = native.unserved(torch.zeros(1), NetworkShape(4, 4)) is None


def diverges(depth: int, length: int) -> bool:
    """Whether a memory without a LayerNorm diverges, by definition."""
    return depth > 1 or length > 33


@settings(max_examples=25, deadline=None)
@given(call=calls((1, 2, 17, 33, 150), (1, 5, 16, 70, 200), starts=0.1, with_norm=diverges))
def test_equals_the_definition(call: Call):
    backends = ["chunked", "native"] if call.options["chunk_size"] <= MAX_BLOCK and NATIVE else ["chunked"]
    compare(call.tensors, call.depth, backends, **call.options, stale=True)


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
