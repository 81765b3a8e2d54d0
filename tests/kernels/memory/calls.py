"""Random calls of the memory in float64, and the comparison of two implementations on them."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from titans_pt.kernels.memory import MemoryState, NetworkShape, native, neural_memory

DUAL = ["chunked", *([] if native.unserved(torch.zeros(1), NetworkShape(4, 4)) else ["native"])]
"""Implementations of the dual form available on this machine."""
TOLERANCE = 1e-9


def make(B, T, H, D, hidden, depth, *, per_layer=False, extremes=False, norm=True, seed=0):
    """Random inputs; with ``extremes`` a third of the gates are exactly 0 or 1."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(rand(B, T, H, D), dim=-1) for _ in range(2))
    v = rand(B, T, H, D)
    shape = (B, T, H, depth) if per_layer else (B, T, H)
    theta, eta, alpha = (torch.rand(shape, generator=gen, dtype=torch.float64) for _ in range(3))
    theta = 0.02 * theta
    if extremes:
        eta, alpha = (
            torch.where(torch.rand(shape, generator=gen) < 0.3, torch.randint(0, 2, shape, generator=gen).double(), g)
            for g in (eta, alpha)
        )
    widths = [D] + [hidden] * (depth - 1) + [D]
    weights = [rand(H, a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)]
    affine = [1 + 0.3 * rand(H, D), 0.3 * rand(H, D)] if norm else []
    return [q, k, v, theta, eta, alpha, *weights, *affine]


def run(backend, tensors, depth, *, initial=None, **options):
    """Flat outputs and final state, gradients of a random weighting of all of them, and the final offset."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    weights = tuple(leaves[6 : 6 + depth])
    norm = tuple(leaves[6 + depth :]) or None
    states = []
    if initial is not None:
        states = [w.clone().requires_grad_() for group in initial[:3] for w in group]
        groups = [tuple(states[i * depth : (i + 1) * depth]) for i in range(3)]
        options["initial_state"] = MemoryState(*groups, initial[3].clone())
    out, state = neural_memory(*leaves[:6], weights, norm=norm, backend=backend, output_final_state=True, **options)
    results = [out, *state.weights, *state.momentum, *state.chunk_weights]
    gen = torch.Generator().manual_seed(99)
    total = sum((r * torch.randn(r.shape, generator=gen, dtype=r.dtype)).sum() for r in results)
    return results, torch.autograd.grad(total, leaves + states, materialize_grads=True), state.offset


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        scale = max(1.0, y.abs().max().item())
        assert (x - y).abs().max().item() <= TOLERANCE * scale


def assert_cuts_are_invisible(tensors, depth, cuts, resets, **options):
    """Assert that 40 tokens cut at ``cuts`` give the outputs and final state of one call."""
    weights, norm = tuple(tensors[6 : 6 + depth]), tuple(tensors[6 + depth :])
    reset = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.1 if resets else None
    options |= {"norm": norm, "output_final_state": True}
    whole, end = neural_memory(*tensors[:6], weights, reset=reset, **options)
    pieces, state = [], None
    for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 40], strict=True):
        part = None if reset is None else reset[:, a:b]
        out, state = neural_memory(
            *(x[:, a:b] for x in tensors[:6]), weights, reset=part, initial_state=state, **options
        )
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=TOLERANCE)
    for group in ("weights", "momentum", "chunk_weights"):
        for a, b in zip(getattr(state, group), getattr(end, group), strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(state.offset, end.offset)


def compare(tensors, depth, backends=DUAL, **options):
    out, grad, offset = run("naive", tensors, depth, **options)
    for backend in backends:
        out_, grad_, offset_ = run(backend, tensors, depth, **options)
        assert_same(out_, out)
        assert_same(grad_, grad)
        assert torch.equal(offset_, offset)


@dataclass
class Call:
    """Random inputs from ``make``, and options for ``run``."""

    tensors: list[Tensor]
    depth: int
    extremes: bool
    seed: int
    options: dict


@st.composite
def calls(draw, lengths=(1, 2, 15, 17, 33), chunks=(1, 5, 8, 16, 100), starts=0.15, with_norm=lambda _depth, _T: False):
    """Draw any network, forgetting and gates; documents that start at a share ``starts`` of tokens, or none; a state
    inside a chunk, or none.

    with_norm(depth, T): whether a memory of this depth over T tokens needs its LayerNorm.
    """
    B, H, T, C = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from(lengths)),
        draw(st.sampled_from(chunks)),
    )
    D, hidden, depth = draw(st.sampled_from([4, 8])), draw(st.sampled_from([5, 8])), draw(st.integers(1, 4))
    per_layer, extremes, residual, resets, initial = (draw(st.booleans()) for _ in range(5))
    norm, seed = with_norm(depth, T) or draw(st.booleans()), draw(st.integers(0, 10**6))
    tensors = make(B, T, H, D, hidden, depth, per_layer=per_layer, extremes=extremes, norm=norm, seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    network = NetworkShape(D, hidden, depth, norm, residual, draw(st.sampled_from(["gelu", "silu", "relu"])))
    options = dict(network=network, chunk_size=C, forget_to=draw(st.sampled_from(["start", "zero"])),
                   save_every=draw(st.sampled_from([None, 1, 3])))  # fmt: skip
    if resets:
        options["reset"] = torch.rand(B, T, generator=gen) < starts
    if initial:
        start = [
            [0.3 * torch.randn(B, *w.shape, generator=gen, dtype=w.dtype) for w in tensors[6 : 6 + depth]]
            for _ in range(3)
        ]
        options["initial"] = (*start, torch.randint(0, C, (B,), generator=gen))
    return Call(tensors, depth, extremes, seed, options)
