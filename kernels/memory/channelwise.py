"""The exact chunkwise form where every channel forgets by itself: alpha in [0, 1]^d_in for each weight matrix.

Row d of M (x @ M takes channel d of x there) decays with a_t[d] = 1 - alpha_t[d]. In a block that starts at (M, S),
with the gradients u_i = x_i g_i^T of the chunk's start, row d of the recurrence in naive.py unrolls to

    M_t[d] = A_t[d] M[d] + B_t[d] S[d] - sum_{i<=t} P[t, i, d] theta_i x_i[d] g_i
    P[t, i] = a_t P[t-1, i] + E[t, i]       E[t, i] = prod_{i<l<=t} eta_l
    A_t = a_t A_{t-1}, A_0 = 1              B_t = a_t B_{t-1} + m_t, B_0 = 0, m_t = prod_{l<=t} eta_l

so that queries meet (A_t z_t) M + (B_t z_t) S - sum_i R[t, i] theta_i g_i, R[t, i] = sum_d z_t[d] P[t, i, d] x_i[d],
and no token has a weight set of its own. P is a tensor (block, block, d_in), made as it stands above: a block is short,
and gates of exactly 0 and 1 are ordinary. The scaled queries and keys of gated linear attention, which need no such
tensor, divide products of decays by one another; and momentum makes P a sum of such products, which does not factor.

Backward: autograd. Runs of ``save_every`` blocks are computed again; between them the state is kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titans_pt.kernels.memory import mlp
from titans_pt.kernels.memory.blockwise import Scan, blockwise_memory
from titans_pt.kernels.memory.dual import Held, goal, key_side
from titans_pt.kernels.memory.state import MemoryState, Weights

BLOCK = 16
"""Tokens of a compute block at most: P has BLOCK times as many numbers as the keys, for each layer."""


class Coefficients(NamedTuple):
    """What the gates say of a block, for one layer; d is its d_in, N = B H.

    A, B: (N, c, d). P: (N, c, c, d). a, b: (N, d, 1), A and B of the last token. m: (N, 1, 1), of S in the last S.
    p: (N, c, d), P of the last token, times theta. e: (N, c, 1), E of the last token, times theta. theta: (N, 1, c).
    """

    A: Tensor
    B: Tensor
    P: Tensor
    a: Tensor
    b: Tensor
    m: Tensor
    p: Tensor
    e: Tensor
    theta: Tensor


def channelwise_memory(*inputs, **options) -> tuple[Tensor, MemoryState]:
    """Arguments as in :func:`titans_pt.kernels.memory.naive.naive_memory`, alpha (B, T, H, channels), and save_every.

    Memory: that of :func:`titans_pt.kernels.memory.blockwise.blockwise_memory`, mostly P.
    """
    return blockwise_memory(_Scan, BLOCK, *inputs, **options)


class _Scan(Scan):
    def coefficients(self, theta, eta, alpha, valid):
        return _coefficients(theta, eta, alpha, valid)

    def block(self, q, k, v, coefficients: tuple[Coefficients, ...], W: Weights, S: Weights, F: Weights):
        act = mlp.ACTIVATIONS[self.network.activation]
        keys = key_side(k, goal(k, v, self.norm, self.network), self.norm, Held(F), self.network)
        z, new_W, new_S = q, [], []
        for layer, c in enumerate(coefficients):
            x, g = keys.X[layer], keys.G[layer]
            z = act(z) if layer else z
            # (N, c, c, d) times (N, c, d, 1): R, in one pass over P.
            scores = (c.P * x.unsqueeze(1) @ z.unsqueeze(-1)).squeeze(-1) * c.theta
            seen = (c.A * z) @ W[layer] + (c.B * z) @ S[layer] - scores @ g
            z = seen + z @ self.begin[layer] if self.to_start else seen
            new_W.append(c.a * W[layer] + c.b * S[layer] - (c.p * x).mT @ g)
            new_S.append(c.m * S[layer] - (c.e * x).mT @ g)
        return mlp.finish(z, q, self.norm, self.network), tuple(new_W), tuple(new_S)


def _coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> list[Coefficients]:
    """Of each block. theta, eta: (n, N, c, 1). alpha: (n, N, c, d). valid: (n, N, c), or None where all tokens are;
    those that are not change nothing."""
    keep, writes = 1 - alpha, torch.ones_like(eta)
    if valid is not None:
        valid = valid.unsqueeze(-1)
        theta, eta, keep, writes = (
            torch.where(valid, g, float(fill)) for g, fill in ((theta, 0), (eta, 1), (keep, 1), (writes, 0))
        )
    A, m = torch.cumprod(keep, -2), torch.cumprod(eta, -2)
    own = torch.eye(eta.shape[-2], dtype=eta.dtype, device=eta.device).unsqueeze(-1)
    E, b, p, B, P = torch.zeros_like(eta), torch.zeros_like(keep[..., 0, :]), torch.zeros_like(keep), [], []
    tokens = zip(own, *(gate.unbind(-2) for gate in (eta, keep, writes, m)), strict=True)
    for here, eta_t, keep_t, writes_t, m_t in tokens:
        E = E * eta_t.unsqueeze(-2) + here
        b = keep_t * b + writes_t * m_t
        p = keep_t.unsqueeze(-2) * p + writes_t.unsqueeze(-2) * E
        B.append(b)
        P.append(p)
    last = A[..., -1, :, None], b.unsqueeze(-1), m[..., -1:, :]
    parts = A, torch.stack(B, -2), torch.stack(P, -3), *last, p * theta, E * theta, theta.mT
    return [Coefficients(*block) for block in zip(*(part.unbind() for part in parts), strict=True)]
