"""Figures of each token's effect on the memory: an observer of the naive definition, slow and plain on purpose."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titans_pt.kernels.memory.call import Author, MemoryCall
from titans_pt.kernels.memory.naive import naive_memory
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import TITANS, Own, Rule
from titans_pt.kernels.memory.state import Weights


@dataclass
class Trace:
    """Figures of each token, (B, T, H), fp32 (fp64 for fp64 inputs). Norms are Frobenius, over a head's L matrices.

    surprise: ||u_t||. u_t is the gradient of the rule's loss at the weights of the start of t's chunk; in Titans grad_W
    ||M_{t'}(k_t) - v_t||^2. weight_norm: ||M_t||. momentum_norm: ||S_t||; both after the token. theta, eta, alpha: the
    gates, averaged over matrices if each has its own.
    """

    surprise: Tensor
    weight_norm: Tensor
    momentum_norm: Tensor
    theta: Tensor
    eta: Tensor
    alpha: Tensor


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
    rule: Rule = TITANS,
    own: Own = (),
    **options: Any,
) -> Trace:
    """Trace the writes of a memory. Arguments as in :func:`~titans_pt.kernels.memory.neural_memory`, without queries,
    which write nothing. options: chunk_size, forget_to, initial_state, reset.
    """
    weights = tuple(weights)
    return _traced(MemoryCall.given(k, k, v, theta, eta, alpha, weights, network, norm, rule, own, **options))


@torch.no_grad()
def self_modifying_trace(
    q: Tensor,
    author: Author,
    weights: Weights,
    *,
    network: NetworkShape | None = None,
    norm: Weights | None = None,
    rule: Rule = TITANS,
    **options: Any,
) -> Trace:
    """Trace a memory with an author. Arguments as in :func:`~titans_pt.kernels.memory.self_modifying_memory`; options
    as in :func:`memory_trace`."""
    return _traced(MemoryCall.authored(q, author, tuple(weights), network, norm, rule, **options))


def _traced(call: MemoryCall) -> Trace:
    call.check()
    figures = []

    def note(gradient: Weights, weights: Weights, momentum: Weights, gates: Weights):
        norms = (_norm(matrices) for matrices in (gradient, weights, momentum))
        figures.append(torch.stack([*norms, *(gate.mean(-1) for gate in gates)]))

    naive_memory(call, note)
    return Trace(*torch.stack(figures, dim=2).unbind(0))


def _norm(matrices: Weights) -> Tensor:
    """L tensors (B, H, d_in, d_out) -> (B, H)."""
    return torch.stack([m.square().sum((-2, -1)) for m in matrices]).sum(0).sqrt()
