"""The exact chunked form: matrix products over chunks of tokens, one state per chunk.

With G the sum of the log decays from a chunk's start to each token, itself included, S the state before the chunk,
and P(x, y)[i, j] = sum_k x[i, k] y[j, k] exp(G[i, k] - G[j, k]) for j <= i in one document, else 0:

    (I + beta tril(P(e, k), -1)) U = beta (V - (e exp(G)) S)      (without the delta rule: U = V)
    O  = (q exp(G)) S + P(q, k) U
    S' = exp(G_end) S + (k exp(G_end - G))^T U

with e the erase keys, k itself for the delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464, Section 3.3,
here with a decay that may differ between channels).
exp is applied to sums of log decays only, never to their negatives: it can underflow but not overflow. Masks separate
documents, since an infinite decay would give inf - inf. Log decays have a lower bound at which nothing visible remains:
G[i] - G[j] would otherwise lose the weak decays that follow a strong one.

Everything that does not need S is computed for all chunks at once; only S is passed from chunk to chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk. A power of two: see _pairs."""


def chunked_linear_memory(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, erase: Tensor | None, state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results as in :func:`titans_pt.kernels.linear_memory.naive.naive_linear_memory`."""
    length, delta = q.shape[1], beta is not None or erase is not None
    chunk = min(CHUNK, 1 << (int(length) - 1).bit_length())  # torch.jit.trace has tensors for lengths

    def fold(x: Tensor) -> Tensor:
        """(B, T, H, ...) -> (N, B, H, C, ...), padded at the end with tokens that neither write nor decay."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -length % chunk)).unflatten(1, (-1, chunk))
        return x.movedim(1, 0).transpose(2, 3)

    q, k, v = map(fold, (q, k, v))
    e = k if erase is None else fold(erase)
    mask = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    from_start, erasing, writing, end = q, e, k, None
    if decay is not None:
        decay = decay.clamp(min=2 * math.log(torch.finfo(decay.dtype).eps))
        G = fold(decay if decay.dim() == 4 else decay.unsqueeze(-1)).cumsum(-2)
        grown = G.exp()
        from_start, erasing, writing = q * grown, e * grown, k * (G[..., -1:, :] - G).exp()
        end = grown[..., -1, :, None]
    if reset is not None:
        document = fold(reset.unsqueeze(-1)).unsqueeze(-1).cumsum(-2)  # numbered within the chunk
        mask = mask & (document == document.mT)
        before, after = document > 0, document < document[..., -1:, :]
        from_start, erasing = (x.masked_fill(before, 0.0) for x in (from_start, erasing))
        writing = writing.masked_fill(after, 0.0)
        kept = (~before[..., -1:, :]).to(q.dtype)
        end = kept if end is None else end * kept

    if decay is None or decay.dim() == 3:
        # Above the diagonal, where G[i] - G[j] is positive, exp sees -inf.
        between = mask.to(q.dtype) if decay is None else (G - G.mT).masked_fill(~mask, -torch.inf).exp()

        def pairs(x: Tensor) -> Tensor:
            return x @ k.mT * between
    else:

        def pairs(x: Tensor) -> Tensor:
            return _pairs(x, k, G).masked_fill(~mask, 0.0)

    if delta:
        left, right = pairs(e), torch.cat([v, erasing], -1)
        if beta is not None:
            b = fold(beta).unsqueeze(-1)
            left, right = b * left, b * right
        solved = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
        v, erasing = solved.split([v.shape[-1], k.shape[-1]], -1)

    # unbind, not x[n]: the backward pass of indexing writes a gradient as large as x for every chunk.
    ends = [None] * len(q) if end is None else end.unbind()
    states, made = [], []
    for v_n, erasing_n, writing_n, end_n in zip(*(x.unbind() for x in (v, erasing, writing.mT)), ends, strict=True):
        states.append(state)
        made.append(v_n - erasing_n @ state if delta else v_n)
        state = writing_n @ made[-1] + (state if end_n is None else end_n * state)
    out = from_start @ torch.stack(states) + pairs(q) @ (torch.stack(made) if delta else v)
    return out.transpose(2, 3).movedim(0, 1).flatten(1, 2)[:, :length], state


def _pairs(x: Tensor, y: Tensor, G: Tensor) -> Tensor:
    """Return sum_k x[i, k] y[j, k] exp(G[i, k] - G[j, k]) for j <= i, else 0: (..., C, C) from (..., C, K).

    C is a power of two. G never increases: exp(G[i] - G[j]) is the product of exp(G[i] - G[m]) and exp(G[m] - G[j])
    with j <= m < i, both at most 1. With m the end of the first half, the pairs that lie in different halves are one
    matrix product; each half is the same problem again.
    """
    if x.shape[-2] == 1:
        return (x * y).sum(-1, keepdim=True)
    (x, y, G), half = (t.unflatten(-2, (2, -1)) for t in (x, y, G)), x.shape[-2] // 2
    near = _pairs(x, y, G)
    first, second = G.unbind(-3)
    middle = first[..., -1:, :]
    far = (x[..., 1, :, :] * (second - middle).exp()) @ (y[..., 0, :, :] * (middle - first).exp()).mT
    return torch.cat([F.pad(near[..., 0, :, :], (0, half)), torch.cat([far, near[..., 1, :, :]], -1)], -2)
