"""The scan token by token in PyTorch, on any device."""

import torch
from torch import Tensor


def loop_scan(
    x: Tensor, step: Tensor, k: Tensor, q: Tensor, rate: Tensor | None, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan token by token; returns outputs (B, T, D) and the state after the last token.

    x, step (B, T, D), k, q (B, T, N), rate None or (D, N), state (B, D, N), reset None or bool (B, T).
    """
    # unbind, not x[:, t]: the backward pass of indexing writes a gradient as large as x for every token.
    begins = [None] * x.shape[1] if reset is None else (~reset).view(*reset.shape, 1, 1).to(x.dtype).unbind(1)
    columns = (step.unsqueeze(-1), (step * x).unsqueeze(-1), k.unsqueeze(-2), q.unsqueeze(-1))
    pace = None if rate is None else -rate
    outputs = []
    for s_t, u_t, k_t, q_t, kept in zip(*(c.unbind(1) for c in columns), begins, strict=True):
        decay = 1 - s_t * k_t.square() if pace is None else torch.exp(pace * s_t)
        if kept is not None:
            decay = decay * kept
        state = torch.addcmul(decay * state, u_t, k_t)
        outputs.append(state @ q_t)
    return torch.stack(outputs, 1).squeeze(-1), state
