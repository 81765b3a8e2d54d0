"""Definition of the linear memory, token by token: the reference for every other implementation."""

import torch
from torch import Tensor


def naive_linear_memory(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, erase: Tensor | None, state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Read and write token by token; returns outputs (B, T, H, V) and the state after the last token.

    q, k (B, T, H, K), v (B, T, H, V), decay None, (B, T, H) or (B, T, H, K), beta None or (B, T, H),
    erase None or (B, T, H, K), state (B, H, K, V), reset None or bool (B, T).
    """

    def tokens(x: Tensor | None):
        # Not x[:, t]: the backward pass of indexing writes a gradient as large as x for every token.
        return [None] * q.shape[1] if x is None else x.unbind(1)

    if beta is not None and erase is None:
        erase = k
    outputs = []
    for q_t, k_t, v_t, g_t, b_t, e_t, begins in zip(*map(tokens, (q, k, v, decay, beta, erase, reset)), strict=True):
        if begins is not None:
            state = torch.where(begins.view(-1, 1, 1, 1), 0.0, state)
        if g_t is not None:
            state = (g_t.unsqueeze(-1) if g_t.dim() == 3 else g_t[..., None, None]).exp() * state
        write = v_t
        if e_t is not None:
            write = v_t - (e_t.unsqueeze(-2) @ state).squeeze(-2)
        if b_t is not None:
            write = b_t.unsqueeze(-1) * write
        state = state + k_t.unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1), state
