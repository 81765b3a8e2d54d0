"""Figures of each token's effect on the memory: an observer of the naive definition, slow and plain on purpose."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.memory.call import MemoryCall
from titans_pt.kernels.memory.naive import naive_memory
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import TITANS, Own, Rule
from titans_pt.kernels.memory.state import MemoryState, Weights, state_dtype


@dataclass
class Trace:
    """Each (B, T, H), fp32 (fp64 for fp64 inputs); norms are Frobenius, over all L matrices of a head together.

    surprise: ||u_t||, u_t the gradient of the rule's loss, in Titans grad_W ||M_{t'}(k_t) - v_t||^2, at the weights of
    the start of t's chunk. weight_norm: ||M_t||. momentum_norm: ||S_t||; both after the token.
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
    rule: Rule = TITANS,
    own: Own = (),
) -> Trace:
    """The arguments are those of :func:`~titans_pt.kernels.memory.neural_memory`, without the queries: those write
    nothing.
    """
    dtype = state_dtype(k)
    gates = (g.to(dtype) if g.dim() == 4 else g.to(dtype).unsqueeze(-1) for g in (theta, eta, alpha))
    call = MemoryCall(
        k, k, v, *gates, tuple(weights), network or NetworkShape.of(weights, norm), norm, rule,
        tuple(gate.to(dtype).unsqueeze(-1) for gate in own), chunk_size, forget_to, initial_state, reset,
    )  # fmt: skip
    call.check()
    figures = []
    naive_memory(call, lambda *found: figures.append(torch.stack([_norm(matrices) for matrices in found])))
    return Trace(*torch.stack(figures, dim=2).unbind(0))


def _norm(matrices: Weights) -> Tensor:
    """L tensors (B, H, d_in, d_out) -> (B, H)."""
    return torch.stack([m.square().sum((-2, -1)) for m in matrices]).sum(0).sqrt()
