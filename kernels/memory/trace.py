"""What each token does to the memory, as figures: an instrument, token by token, on the naive definition.

Slow and plain on purpose; nothing is differentiated. See naive.py for the recurrence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.memory.dual import Held, goal, key_side
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import MemoryState, Weights, choose, state_dtype


@dataclass
class Trace:
    """Each (B, T, H), fp32 (fp64 for fp64 inputs); norms are Frobenius, over all L matrices of a head together.

    surprise: ||u_t||, u_t = grad_W ||M_{t'}(k_t) - v_t||^2 at the weights of the start of t's chunk.
    weight_norm: ||M_t||. momentum_norm: ||S_t||; both after the token.
    """

    surprise: Tensor
    weight_norm: Tensor
    momentum_norm: Tensor


@torch.no_grad()
def memory_trace(
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    weights: Weights,
    *,
    network: NetworkShape | None = None,
    norm: Weights | None = None,
    chunk_size: int = 16,
    forget_to: str = "zero",
    initial_state: MemoryState | None = None,
    reset: Tensor | None = None,
) -> Trace:
    """The arguments are those of :func:`~titans_pt.kernels.memory.neural_memory`, without the queries: those write
    nothing.
    """
    batch, length = k.shape[:2]
    dtype = state_dtype(k)
    layers = len(weights)
    k, v = k.to(dtype), v.to(dtype)
    begin = tuple(w.to(dtype).expand(batch, *w.shape) for w in weights)
    affine = () if norm is None else tuple(p.to(dtype).unsqueeze(-2) for p in norm)
    network = network or NetworkShape.of(weights, norm)
    # Of each matrix (B, T, H, 1 or d_in, 1), ready to scale it.
    theta, eta, alpha = (
        [part.unsqueeze(-1) for part in network.per_layer((g if g.dim() == 4 else g.unsqueeze(-1)).to(dtype))]
        for g in (theta, eta, alpha)
    )
    state = initial_state or MemoryState.initial(weights, batch, dtype)
    current, momentum, start, offset = state.weights, state.momentum, state.chunk_weights, state.offset.to(k.device)

    figures = []
    for t in range(length):
        if reset is not None:
            begins = reset[:, t]
            current = choose(begins, begin, current)
            momentum = tuple(torch.where(begins.view(-1, 1, 1, 1), 0.0, s) for s in momentum)
            offset = torch.where(begins, 0, offset)
        start = choose(offset == 0, current, start)
        key, value = k[:, t].unsqueeze(-2), v[:, t].unsqueeze(-2)
        keys = key_side(key, goal(key, value, affine, network), affine, Held(start), network)
        momentum = tuple(
            eta[n][:, t] * s - theta[n][:, t] * (x.mT @ g)
            for n, (s, x, g) in enumerate(zip(momentum, keys.X, keys.G, strict=True))
        )
        origin = begin if forget_to == "start" else (0.0,) * layers
        current = tuple(
            w0 + (1 - alpha[n][:, t]) * (w - w0) + s
            for n, (w, w0, s) in enumerate(zip(current, origin, momentum, strict=True))
        )
        offset = (offset + 1) % chunk_size
        # ||x g^T|| = ||x|| ||g||: the gradient's norm needs no matrix.
        squares = [x.square().sum((-2, -1)) * g.square().sum((-2, -1)) for x, g in zip(keys.X, keys.G, strict=True)]
        figures.append(torch.stack([sum(squares).sqrt(), _norm(current), _norm(momentum)]))
    return Trace(*torch.stack(figures, dim=2).unbind(0))


def _norm(matrices: Weights) -> Tensor:
    """L tensors (B, H, d_in, d_out) -> (B, H)."""
    return sum(m.square().sum((-2, -1)) for m in matrices).sqrt()
