"""Linear memories as special cases: each target's own recurrence, written down, against neural_memory.

The memory's loss is ||M(k) - v||^2, the targets' 1/2 ||.||^2: hence theta = beta / 2 everywhere.
"""

import pytest
import torch

from titans_pt.kernels.memory import NetworkShape, neural_memory

B, T, H, D = 2, 37, 2, 8


@pytest.fixture
def inputs():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, generator=gen, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, decay = (torch.rand(B, T, H, generator=gen, dtype=torch.float64) for _ in range(2))
    return q, k, v, beta, decay


def linear_memory(q, k, v, theta, eta, alpha, chunk_size=1, backend="chunked"):
    zero = torch.zeros(H, D, D, dtype=torch.float64)
    matrix = NetworkShape(D, D, depth=1, norm=False, residual=False)
    return neural_memory(q, k, v, theta, eta, alpha, (zero,), network=matrix, chunk_size=chunk_size, backend=backend)[0]


def recurrence(step, q, k, v, *gates):
    """Run ``step(S, k, v, *gates) -> S`` along time for S (B, H, d_k, d_v); read with q after each write."""
    state = q.new_zeros(B, H, D, D)
    outputs = []
    for t in range(q.shape[1]):
        state = step(state, k[:, t], v[:, t], *(g[:, t, :, None, None] for g in gates))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1)


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def predicted(state, k):
    return torch.einsum("bhk,bhkv->bhv", k, state)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_delta_net(inputs, backend):
    q, k, v, beta, _ = inputs
    want = recurrence(lambda S, k, v, b: S + b * outer(k, v - predicted(S, k)), q, k, v, beta)
    none = torch.zeros_like(beta)
    same(linear_memory(q, k, v, beta / 2, none, none, backend=backend), want)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_gated_delta_net(inputs, backend):
    """Gated DeltaNet decays BEFORE the delta step: S = a S + b k (v - a S k), so theta = a b / 2, the value v / a."""
    q, k, v, beta, decay = inputs
    decay = 0.2 + 0.8 * decay
    want = recurrence(lambda S, k, v, b, a: a * S + b * outer(k, v - predicted(a * S, k)), q, k, v, beta, decay)
    got = linear_memory(
        q, k, v / decay.unsqueeze(-1), decay * beta / 2, torch.zeros_like(beta), 1 - decay, backend=backend
    )
    same(got, want)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_longhorn(inputs, backend):
    """The implicit step: S = argmin ||S' - S||^2 + b ||S' k - v||^2, that is, beta -> beta / (1 + beta k.k)."""
    q, k, v, beta, _ = inputs
    eye = torch.eye(D, dtype=torch.float64)

    def step(S, k, v, b):
        return torch.linalg.solve(eye + b * outer(k, k), S + b * outer(k, v))

    none = torch.zeros_like(beta)
    theta = beta / (1 + beta * k.square().sum(-1)) / 2
    same(linear_memory(q, k, v, theta, none, none, backend=backend), recurrence(step, q, k, v, beta))


def test_linear_attention(inputs):
    """One chunk spans the sequence and M_0 = 0: all gradients are taken at zero, so they are -2 k v^T."""
    q, k, v, beta, _ = inputs
    want = recurrence(lambda S, k, v, b: S + outer(k, v), q, k, v, beta)
    half, none = torch.full_like(beta, 0.5), torch.zeros_like(beta)
    same(linear_memory(q, k, v, half, none, none, chunk_size=T), want)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_ttt_linear(inputs, chunk):
    """TTT (arXiv 2407.04620), Eq. 6: mini-batch gradients at the weights of the mini-batch's start."""
    q, k, v, beta, _ = inputs
    state, outputs = q.new_zeros(B, H, D, D), []
    for t in range(T):
        if t % chunk == 0:
            start = state
        state = state + beta[:, t, :, None, None] * outer(k[:, t], v[:, t] - predicted(start, k[:, t]))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    none = torch.zeros_like(beta)
    same(linear_memory(q, k, v, beta / 2, none, none, chunk_size=chunk), torch.stack(outputs, 1))
