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

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titans_pt.kernels.blocks import cut
from titans_pt.kernels.memory import mlp
from titans_pt.kernels.memory.chunked import _join, _Layout, _runs
from titans_pt.kernels.memory.dual import goal, key_side
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import MemoryState, Weights, choose

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


def channelwise_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    weights: Weights,
    *,
    network: NetworkShape,
    norm: Weights | None,
    chunk_size: int,
    forget_to: str,
    state: MemoryState,
    reset: Tensor | None,
    save_every: int | None,
) -> tuple[Tensor, MemoryState]:
    """Arguments as in :func:`titans_pt.kernels.memory.naive.naive_memory`, alpha (B, T, H, channels).

    Memory beyond inputs and outputs: the state (three weight sets) per ``save_every`` blocks, and what autograd keeps
    of that many, mostly P; None is the square root of the number of blocks.
    """
    batch, length, heads = q.shape[:3]
    blocks = cut(state.offset, reset, length, chunk_size, min(chunk_size, BLOCK))

    def fold(tensors: Weights) -> Weights:
        return tuple(w.reshape(batch * heads, *w.shape[2:]) for w in tensors)

    def unfold(tensors: Weights) -> Weights:
        return tuple(w.view(batch, heads, *w.shape[1:]) for w in tensors)

    begin = fold(weights)
    affine = None if norm is None else tuple(p.reshape(batch * heads, 1, -1) for p in norm)
    scan = _Scan(network, affine, begin, forget_to == "start")
    W, S, F = fold(state.weights), fold(state.momentum), fold(state.chunk_weights)
    if scan.to_start:
        W = _minus(W, begin)
    outputs = []
    for first, last, tokens in _runs(blocks):
        layout = _Layout(blocks, first, last, tokens, heads)
        tensors = [layout.fold(x) for x in (q, k, v, theta, eta, alpha)]
        valid = layout.valid(q.device)
        new_chunk, new_document = (layout.rows(f, q.device) for f in (blocks.new_chunk, blocks.new_document))
        every, parts = save_every or math.isqrt(layout.count), []
        for begins in range(0, layout.count, every):
            part = slice(begins, begins + every)
            out, W, S, F = checkpoint(
                scan.blocks, *(x[part] for x in tensors), None if valid is None else valid[part], new_chunk[part],
                new_document[part], W, S, F, use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            parts.append(out)
        outputs.append(layout.unfold(torch.cat(parts)))

    if scan.to_start:
        W = _plus(W, begin)
    # A chunk that is complete ends here: the next one starts at the current weights.
    frozen = choose((blocks.offset == 0).to(q.device).repeat_interleave(heads), W, F)
    return _join(outputs, blocks, length), MemoryState(unfold(W), unfold(S), unfold(frozen), blocks.offset)


def _plus(a: Weights, b: Weights) -> Weights:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Weights, b: Weights) -> Weights:
    return tuple(x - y for x, y in zip(a, b, strict=True))


@dataclass
class _Scan:
    """The recurrence over blocks.

    norm: two (N, 1, D), or None. begin: M_0, L tensors (N, d_in, d_out). to_start: whether forgetting leads to M_0, not
    to zero; weights W are then differences to it, forgotten to zero, and queries meet M_0 + W.
    """

    network: NetworkShape
    norm: Weights | None
    begin: Weights
    to_start: bool

    def blocks(
        self, q, k, v, theta, eta, alpha, valid, new_chunk: list, new_document: list, W: Weights, S: Weights, F: Weights
    ) -> tuple[Tensor, Weights, Weights, Weights]:
        """Outputs (n, N, c, D) of n blocks, and the state after them.

        q, k, v: (n, N, c, D). theta, eta, alpha: (n, N, c, .). valid: (n, N, c) or None. new_chunk, new_document: of
        each block True, False or the rows (N,) where one begins.
        """
        layers = zip(*(self.network.per_layer(gate) for gate in (theta, eta, alpha)), strict=True)
        # Of each block its layers'. Unbound, not indexed: the gradient of an index is as large as all blocks.
        coefficients = list(zip(*(_coefficients(*gates, valid) for gates in layers), strict=True))
        outputs = []
        for n, given in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), coefficients, strict=True)):
            if new_document[n] is not False:
                zero = tuple(torch.zeros_like(s) for s in S)
                W = choose(new_document[n], zero if self.to_start else self.begin, W)
                S = choose(new_document[n], zero, S)
            if new_chunk[n] is not False:
                F = choose(new_chunk[n], _plus(W, self.begin) if self.to_start else W, F)
            out, W, S = self.block(*given, W, S, F)
            outputs.append(out)
        return torch.stack(outputs), W, S, F

    def block(self, q, k, v, coefficients: tuple[Coefficients, ...], W: Weights, S: Weights, F: Weights):
        """Outputs (N, c, D), and W and S after the block."""
        act = mlp.ACTIVATIONS[self.network.activation]
        keys = key_side(k, goal(k, v, self.norm, self.network), self.norm, F, self.network)
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
