"""memory_trace against the definition: gradient norms by autograd, state norms of naive_memory, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.kernels.memory import MemoryState, NetworkShape, memory_trace, mlp, neural_memory

B, T, H, D = 2, 23, 2, 4


def rand(*shape, gen):
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def make(depth, gates, norm, gen):
    k, v = torch.nn.functional.normalize(rand(B, T, H, D, gen=gen), dim=-1), rand(B, T, H, D, gen=gen)
    shape = (B, T, H, depth) if gates == "layer" else (B, T, H)
    theta, eta, alpha = (torch.rand(shape, generator=gen, dtype=torch.float64) for _ in range(3))
    widths = [D] + [6] * (depth - 1) + [D]
    if gates == "channel":
        alpha = torch.rand(B, T, H, sum(widths[:-1]), generator=gen, dtype=torch.float64)
    weights = tuple(rand(H, a, b, gen=gen) for a, b in zip(widths[:-1], widths[1:], strict=True))
    affine = (1 + 0.3 * rand(H, D, gen=gen), 0.3 * rand(H, D, gen=gen)) if norm else None
    return (k, v, 0.05 * theta, eta, alpha), weights, affine


def norm_of(matrices):
    return torch.stack([m.flatten(2).norm(dim=-1) for m in matrices]).norm(dim=0)


def gradient_norm(k, v, start, norm, network):
    """Norm (B, H) of the gradient by autograd, for k, v (B, H, D) and weights (B, H, d_in, d_out)."""
    leaves = [w.clone().requires_grad_() for w in start]
    affine = norm and tuple(p.unsqueeze(-2) for p in norm)
    y = mlp.forward(k.unsqueeze(-2), leaves, affine, network).squeeze(-2)
    return norm_of(torch.autograd.grad((y - v).square().sum(), leaves))


@settings(max_examples=25, deadline=None)
@given(depth=st.integers(1, 4), C=st.sampled_from([1, 4, 7, 64]), gates=st.sampled_from(["head", "layer", "channel"]),
       norm=st.booleans(),
       residual=st.booleans(), activation=st.sampled_from(["gelu", "silu", "relu"]), resets=st.booleans(),
       initial=st.booleans(), forget_to=st.sampled_from(["start", "zero"]), seed=st.integers(0, 10**6))  # fmt: skip
def test_trace_equals_the_definition(depth, C, gates, norm, residual, activation, resets, initial, forget_to, seed):
    gen = torch.Generator().manual_seed(seed)
    (k, v, *gates), weights, affine = make(depth, gates, norm, gen)
    network = NetworkShape.of(weights, affine, residual, activation)
    options = dict(network=network, norm=affine, chunk_size=C, forget_to=forget_to)
    state = None
    if initial:
        groups = [tuple(rand(B, *w.shape, gen=gen) for w in weights) for _ in range(3)]
        state = MemoryState(*groups, torch.randint(0, C, (B,), generator=gen))
    reset = torch.rand(B, T, generator=gen) < 0.15 if resets else None
    trace = memory_trace(k, v, *gates, weights, initial_state=state, reset=reset, **options)
    assert trace.surprise.shape == (B, T, H)

    for t in range(T):
        piece = [x[:, t : t + 1] for x in (k, v, *gates)]
        part = None if reset is None else reset[:, t : t + 1]
        before = state or MemoryState.initial(weights, B)
        _, state = neural_memory(
            piece[0], *piece, weights, initial_state=state, reset=part, output_final_state=True, backend="naive",
            **options,
        )  # fmt: skip
        begins = torch.zeros(B, dtype=torch.bool) if part is None else part[:, 0]
        start = [
            torch.where(begins.view(-1, 1, 1, 1), w, torch.where((before.offset == 0).view(-1, 1, 1, 1), m, c))
            for w, m, c in zip(weights, before.weights, before.chunk_weights, strict=True)
        ]
        expected = gradient_norm(k[:, t], v[:, t], start, affine, network)
        for figure, truth in ((trace.surprise, expected), (trace.weight_norm, norm_of(state.weights)),
                              (trace.momentum_norm, norm_of(state.momentum))):  # fmt: skip
            torch.testing.assert_close(figure[:, t], truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_figures_are_fp32(dtype):
    (k, v, *gates), weights, affine = make(2, "head", True, torch.Generator().manual_seed(0))
    exact = memory_trace(k, v, *gates, weights, norm=affine)
    trace = memory_trace(*(x.to(dtype) for x in (k, v, *gates)), [w.to(dtype) for w in weights], norm=affine)
    assert trace.surprise.dtype == trace.weight_norm.dtype == torch.float32
    torch.testing.assert_close(trace.surprise.double(), exact.surprise, rtol=0.1, atol=0.1)
