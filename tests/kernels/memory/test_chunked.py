"""The dual form against the definition, in PyTorch operators and in C: outputs, final state and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.kernels.memory import MemoryState, NetworkShape, native, neural_memory

DUAL = ["chunked", *([] if native.unserved(torch.zeros(1), NetworkShape(4, 4)) else ["native"])]
"""Implementations of the dual form that there are on this machine."""
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


def run(backend, tensors, depth, *, initial=None, output_weight=None, **options):
    """Outputs and final state flat, and the gradients of a random weighting of all of them."""
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
    """40 tokens cut at ``cuts`` give what one call gives: outputs and final state."""
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


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 3), T=st.sampled_from([1, 2, 15, 17, 33]), H=st.integers(1, 2), D=st.sampled_from([4, 8]),
    hidden=st.sampled_from([5, 8]), depth=st.integers(1, 4), C=st.sampled_from([1, 5, 8, 16, 100]),
    per_layer=st.booleans(), extremes=st.booleans(), norm=st.booleans(), residual=st.booleans(),
    activation=st.sampled_from(["gelu", "silu", "relu"]), forget_to=st.sampled_from(["start", "zero"]),
    resets=st.booleans(), initial=st.booleans(), save_every=st.sampled_from([None, 1, 3]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_chunked_equals_naive(
    B, T, H, D, hidden, depth, C, per_layer, extremes, norm, residual, activation, forget_to, resets, initial,
    save_every, seed,
):  # fmt: skip
    tensors = make(B, T, H, D, hidden, depth, per_layer=per_layer, extremes=extremes, norm=norm, seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    network = NetworkShape(D, hidden, depth, norm, residual, activation)
    options = dict(network=network, chunk_size=C, forget_to=forget_to, save_every=save_every)
    if resets:
        options["reset"] = torch.rand(B, T, generator=gen) < 0.15
    if initial:
        start = [
            [0.3 * torch.randn(B, *w.shape, generator=gen, dtype=w.dtype) for w in tensors[6 : 6 + depth]]
            for _ in range(3)
        ]
        options["initial"] = (*start, torch.randint(0, C, (B,), generator=gen))
    compare(tensors, depth, **options)


@pytest.mark.parametrize("T", [63, 100])
@pytest.mark.parametrize("C", [16, 70])
def test_ragged_lengths(T, C):
    compare(make(2, T, 2, 4, 8, 2, extremes=True, seed=T), 2, chunk_size=C)


@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize(("C", "T"), [(1, 70), (5, 130), (8, 150), (16, 150)])
def test_short_chunks_cut_by_documents(C, T, forget_to):
    tensors = make(2, T, 1, 8, 12, 2, per_layer=True, seed=C)
    tensors[5] = 0.05 * tensors[5]  # a memory that forgets all is ill-conditioned
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
    """Without writes alpha = 1 leaves M_0 at once, alpha = 1/2 halves the distance to it with each token."""
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
