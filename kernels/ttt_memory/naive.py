"""Definition of TTT's memory, token by token with autograd: the reference for the dual form."""

import torch
from torch import Tensor

from titans_pt.kernels.common import recordable, recording
from titans_pt.kernels.memory.state import choose
from titans_pt.kernels.ttt_memory.state import Parameters, TTTState, network


def naive_ttt_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    tau: Tensor,
    begin: Parameters,
    norm: Parameters,
    state: TTTState,
    reset: Tensor | None,
) -> tuple[Tensor, TTTState]:
    """Read and train token by token; returns outputs (B, T, H, D) and the state after the last token.

    q, k, v (B, T, H, D), rate (B, T, H), tau (C,), begin (B, H, ...): the parameters after a reset.
    """
    start, sums, offset = state.start, state.sums, state.offset.to(q.device)
    zero = tuple(torch.zeros_like(s) for s in sums)
    reset = None if reset is None else reset.to(q.device)
    outputs = []
    for t in range(q.shape[1]):
        if reset is not None:
            start, sums = choose(reset[:, t], begin, start), choose(reset[:, t], zero, sums)
            offset = torch.where(reset[:, t], 0, offset)
        gradient = _gradient(k[:, t], v[:, t], start, norm)
        sums = tuple(s + _shaped(rate[:, t], s) * g for s, g in zip(sums, gradient, strict=True))
        now = tuple(p - _shaped(tau[offset], p) * s for p, s in zip(start, sums, strict=True))
        outputs.append(network(q[:, t].unsqueeze(-2), now, norm).squeeze(-2))
        offset = (offset + 1) % len(tau)
        start, sums = choose(offset == 0, now, start), choose(offset == 0, zero, sums)
    return torch.stack(outputs, 1), TTTState(start, sums, offset.to(state.offset.device))


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    """Reshape (B,) or (B, H) to the number of dimensions of ``like``."""
    return x.view(*x.shape, *[1] * (like.dim() - x.dim()))


def _gradient(k: Tensor, v: Tensor, parameters: Parameters, norm: Parameters) -> Parameters:
    """Gradient of half the squared error at the parameters, for each row and head."""
    graph = torch.is_grad_enabled()
    with recording():
        k, v = recordable((k, v))
        parameters, norm = recordable(parameters), recordable(norm)
        # Views and no detach(), which would drop tangents.
        parameters = tuple(p if p.requires_grad else p.view_as(p).requires_grad_() for p in parameters)
        error = network(k.unsqueeze(-2), parameters, norm).squeeze(-2) - v
        return torch.autograd.grad(0.5 * error.square().sum(), parameters, create_graph=graph)
