"""The definition, token by token: the oracle that every other implementation is held against.

Titans (arXiv 2501.00663), Eq. 11-14 with chunk-wise gradients (Section 3.2):

    u_t = grad_W ||M_{t'}(k_t) - v_t||^2     at the weights of the start of t's chunk, by autograd
    S_t = eta_t S_{t-1} - theta_t u_t
    M_t = (1 - alpha_t) M_{t-1} + S_t        forget_to="zero", the paper's
    M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t        forget_to="start"
    y_t = M_t(q_t)                           stale: M_{t'}(q_t), the weights of the start of t's chunk

alpha is one number for a whole matrix, or one for each of its rows (channels of d_in): (1 - alpha_t) is then a diagonal
matrix on the left of M_{t-1}, the weights that x @ M takes in.
"""

import torch
from torch import Tensor

from titans_pt.kernels.memory import mlp
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import MemoryState, Weights, choose


def naive_memory(
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
    stale: bool = False,
) -> tuple[Tensor, MemoryState]:
    """q, k, v (B, T, H, D); gates (B, T, H, 1 or L), alpha also (B, T, H, channels); M_0 (B, H, d_in, d_out)."""
    keep_graph = torch.is_grad_enabled()
    current, momentum, start = state.weights, state.momentum, state.chunk_weights
    offset = state.offset.to(q.device)
    affine = None if norm is None else tuple(p.unsqueeze(-2) for p in norm)
    outputs = []
    for t in range(q.shape[1]):
        if reset is not None:
            begins = reset[:, t]
            current = choose(begins, weights, current)
            momentum = tuple(torch.where(begins.view(-1, 1, 1, 1), 0.0, s) for s in momentum)
            offset = torch.where(begins, 0, offset)
        start = choose(offset == 0, current, start)
        gradient = _gradient(k[:, t], v[:, t], start, affine, network, keep_graph)
        # Of each layer theta, eta, alpha, (B, H, 1 or d_in, 1): a row of the matrix is a channel of its inputs.
        gates = [
            tuple(gate.unsqueeze(-1) for gate in layer)
            for layer in zip(*(network.per_layer(gate[:, t]) for gate in (theta, eta, alpha)), strict=True)
        ]
        momentum = tuple(e * s - th * u for (th, e, _), s, u in zip(gates, momentum, gradient, strict=True))
        keep = tuple(1 - a for _, _, a in gates)
        if forget_to == "start":
            current = tuple(w0 + a * (w - w0) for a, w, w0 in zip(keep, current, weights, strict=True))
        else:
            current = tuple(a * w for a, w in zip(keep, current, strict=True))
        current = tuple(w + s for w, s in zip(current, momentum, strict=True))
        outputs.append(mlp.forward(q[:, t].unsqueeze(-2), start if stale else current, affine, network).squeeze(-2))
        offset = (offset + 1) % chunk_size
    # A chunk that is complete ends here: the next one starts at the current weights.
    start = choose(offset == 0, current, start)
    return torch.stack(outputs, 1), MemoryState(current, momentum, start, offset.to(state.offset.device))


def _gradient(k, v, weights, norm, network, keep_graph) -> Weights:
    with torch.enable_grad():
        if not keep_graph:
            weights = tuple(w.detach() for w in weights)
        weights = tuple(w if w.requires_grad else w.requires_grad_() for w in weights)
        prediction = mlp.forward(k.unsqueeze(-2), weights, norm, network).squeeze(-2)
        return torch.autograd.grad((prediction - v).square().sum(), weights, create_graph=keep_graph)
