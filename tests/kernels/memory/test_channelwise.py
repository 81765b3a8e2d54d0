"""Chunkwise forgetting per channel against the definition: outputs, final state, all gradients, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.memory.calls import Call, assert_cuts_are_invisible, assert_same, calls, compare, make, run
from titans_pt.kernels.memory import NetworkShape, neural_memory


def channelwise(tensors, depth, *, extremes=False, seed=0):
    """Tensors from ``make`` with one alpha per channel; with ``extremes`` a third of them are exactly 0 or 1."""
    gen = torch.Generator().manual_seed(seed + 7)
    shape = (*tensors[0].shape[:3], sum(w.shape[1] for w in tensors[6 : 6 + depth]))
    alpha = torch.rand(shape, generator=gen, dtype=torch.float64)
    if extremes:
        ends = torch.randint(0, 2, shape, generator=gen).double()
        alpha = torch.where(torch.rand(shape, generator=gen) < 0.3, ends, alpha)
    return [*tensors[:5], alpha, *tensors[6:]]


@settings(max_examples=40, deadline=None)
@given(call=calls())
def test_equals_the_definition(call: Call):
    tensors = channelwise(call.tensors, call.depth, extremes=call.extremes, seed=call.seed)
    compare(tensors, call.depth, ["chunked"], **call.options)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_equal_channels_are_one_alpha(backend, per_layer):
    """Equal alphas of all channels give the same outputs as one alpha, in the oracle and in the chunked form."""
    depth, network = 3, NetworkShape(4, 6, 3)
    tensors = make(2, 21, 2, 4, 6, depth, per_layer=per_layer)
    (out, _, _) = run(backend, tensors, depth, chunk_size=8)
    alpha = tensors[5] if per_layer else tensors[5].unsqueeze(-1).expand(*tensors[5].shape, depth)
    wide = torch.cat([alpha[..., n : n + 1].expand(*alpha.shape[:3], a) for n, (a, _) in enumerate(network.layers)], -1)
    (same, _, _) = run(backend, [*tensors[:5], wide, *tensors[6:]], depth, chunk_size=8)
    assert_same(same, out)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_a_channel_forgets_its_own_row(backend):
    """Without writes, alpha = 1 on one channel of the second matrix clears only that channel's row of that matrix."""
    q, k, v, theta, eta, alpha, *rest = channelwise(make(1, 3, 2, 4, 6, 2), 2)
    weights, norm = tuple(rest[:2]), tuple(rest[2:])
    alpha = torch.zeros_like(alpha)
    alpha[..., 4 + 5] = 1
    _, end = neural_memory(
        q, k, v, 0 * theta, eta, alpha, weights, norm=norm, chunk_size=2, backend=backend, output_final_state=True
    )
    cleared = weights[1].clone()
    cleared[:, 5] = 0
    assert torch.equal(end.weights[0][0], weights[0]) and torch.equal(end.weights[1][0], cleared)


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 39), max_size=4, unique=True), C=st.sampled_from([1, 4, 16, 64]),
       depth=st.integers(1, 3), resets=st.booleans(), forget_to=st.sampled_from(["start", "zero"]))  # fmt: skip
def test_cuts_are_invisible(cuts, C, depth, resets, forget_to):
    tensors = channelwise(make(2, 40, 2, 4, 6, depth, seed=C), depth)
    assert_cuts_are_invisible(tensors, depth, cuts, resets, chunk_size=C, forget_to=forget_to)


@pytest.mark.parametrize("backend, device", [("triton", "meta"), ("native", "cpu")])
def test_other_kernels_refuse_it_in_one_line(backend, device):
    tensors = [x.float().to(device) for x in channelwise(make(1, 3, 2, 16, 32, 2), 2)]
    with pytest.raises(ValueError, match=f"{backend}.* alpha has one value per channel .model.memory.alpha=channel."):
        neural_memory(*tensors[:6], tuple(tensors[6:8]), norm=tuple(tensors[8:]), backend=backend)


def test_a_wrong_number_of_channels():
    tensors = make(1, 3, 2, 4, 6, 2)
    tensors[5] = torch.zeros(1, 3, 2, 11, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"or alpha have \(1, 3, 2, 10\), got"):
        neural_memory(*tensors[:6], tuple(tensors[6:8]), norm=tuple(tensors[8:]))
