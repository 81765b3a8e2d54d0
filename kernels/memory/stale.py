"""The memory with large chunks that is read as it was at the start of the chunk: plain matrix products.

Nothing of a chunk is seen before the next one, so its queries are one pass through the network, its keys another, and
what they write is a sum over the chunk, M' = a M + b S - sum_i p_i u_i and S' = m S - sum_i e_i u_i (the letters are
those of coefficients.py). It is the global memory of TNT (arXiv 2511.07343, Eq. 5), there without momentum and
forgetting, and close to LaCT (2505.23884).

Backward: autograd. Runs of ``save_every`` chunks are computed again; between them the state is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.memory import mlp
from titans_pt.kernels.memory.blockwise import Scan, blockwise_memory
from titans_pt.kernels.memory.chunked import MAX_BLOCK
from titans_pt.kernels.memory.coefficients import Ends, coefficients
from titans_pt.kernels.memory.dual import Held, goal, key_side
from titans_pt.kernels.memory.state import MemoryState, Weights


def stale_memory(*inputs, **options) -> tuple[Tensor, MemoryState]:
    """Arguments as in :func:`titans_pt.kernels.memory.naive.naive_memory`, and save_every."""
    return blockwise_memory(_Scan, options["chunk_size"], *inputs, **options)


class _Scan(Scan):
    def coefficients(self, theta, eta, alpha, valid):
        return ends(theta, eta, alpha, valid)

    def block(self, q, k, v, coefficients: tuple[Ends, ...], W: Weights, S: Weights, F: Weights):
        keys = key_side(k, goal(k, v, self.norm, self.network), self.norm, Held(F), self.network)
        new_W, new_S = [], []
        for layer, c in enumerate(coefficients):
            x, g = keys.X[layer].mT, keys.G[layer]
            new_W.append(c.a * W[layer] + c.b * S[layer] - x @ (c.p * g))
            new_S.append(c.m * S[layer] - x @ (c.e * g))
        return mlp.forward(q, F, self.norm, self.network), tuple(new_W), tuple(new_S)


def ends(theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> list[Ends]:
    """Of each of n blocks of any length. theta, eta, alpha: (n, N, c, 1); valid: (n, N, c) or None.

    Products within pieces of MAX_BLOCK tokens, which are then joined from the last one backward: of a longer block all
    products would be c x c numbers.
    """
    n, rows, c = theta.shape[:3]
    size = min(c, MAX_BLOCK)
    pieces = -(-c // size)
    missing = pieces * size - c
    if missing and valid is None:
        valid = torch.ones(n, rows, c, dtype=torch.bool, device=theta.device)

    def cut(x: Tensor) -> Tensor:
        """(n, N, c) -> (n pieces, N, size)."""
        return F.pad(x, (0, missing)).unflatten(-1, (pieces, size)).transpose(1, 2).flatten(0, 1)

    gates = (cut(gate.squeeze(-1)).unsqueeze(0) for gate in (theta, eta, alpha))
    each = [x.squeeze(0) for x in coefficients(*gates, None if valid is None else cut(valid))]
    A, B, mix, m, e = (x.unflatten(0, (n, pieces)).unbind(1) for x in each)
    one = torch.ones_like(m[0])
    a, b, momentum, p, into_s = one, torch.zeros_like(one), one, [], []
    for piece in range(pieces - 1, -1, -1):
        p.append(a * mix[piece][..., -1, :, None] + b * e[piece])
        into_s.append(momentum * e[piece])
        a, b = a * A[piece][..., -1:, :], a * B[piece][..., -1:, :] + b * m[piece]
        momentum = momentum * m[piece]
    joined = (torch.cat(x[::-1], -2)[..., :c, :] for x in (p, into_s))
    return [Ends(*block) for block in zip(*(x.unbind() for x in (a, b, momentum, *joined)), strict=True)]
