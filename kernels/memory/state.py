"""State that the memory carries from one call to the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.common import sent

Weights = tuple[Tensor, ...]


def state_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the memory states for inputs ``x``: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def choose(rows: bool | list[bool] | Tensor, yes: Sequence[Tensor], no: Sequence[Tensor]) -> Weights:
    """Select ``yes`` or ``no`` row by row, tensors (N, ...). rows: bool (N,), a list of N, or one bool for all. Nothing
    is copied for one bool, nor for a list whose items agree."""
    if isinstance(rows, list):
        rows = sent(torch.tensor(rows), yes[0].device) if any(rows) and not all(rows) else all(rows)
    if isinstance(rows, bool):
        return tuple(yes if rows else no)
    return tuple(torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(yes, no, strict=True))


@dataclass
class MemoryState:
    """State after any number of tokens, constant in size. Sequences may be cut at any token without changing results.

    The gradient of a token is taken at the weights of its chunk's START. A cut inside a chunk must carry these weights
    and the current ones: three weight sets and one counter, no buffered tokens.

    weights: L tensors (B, H, d_in, d_out), fp32 (fp64 for fp64 inputs): M_t.
    momentum: same shapes: S_t.
    chunk_weights: same shapes: M at the start of the current chunk (equal to ``weights`` when offset is 0).
    offset: (B,) int64, tokens already read of the current chunk, 0 <= offset < chunk_size.
    recent: record of the newest tokens, for a rule with a window (kernels/memory/window.py), (B, H, w, .) each.
    """

    weights: Weights
    momentum: Weights
    chunk_weights: Weights
    offset: Tensor
    recent: tuple[Tensor, ...] = ()

    def to(self, dtype: torch.dtype) -> "MemoryState":
        """Convert the state to another dtype, such as for an fp32 layer after an fp64 one. C and GPU kernels take raw
        addresses and convert nothing."""
        if self.weights[0].dtype == dtype:
            return self

        def converted(tensors: Weights) -> Weights:
            return tuple(t.to(dtype) for t in tensors)

        weights, momentum, start = map(converted, (self.weights, self.momentum, self.chunk_weights))
        return MemoryState(weights, momentum, start, self.offset, converted(self.recent))

    @staticmethod
    def initial(weights: Weights, batch: int, dtype: torch.dtype | None = None) -> "MemoryState":
        """M_0 = weights (L tensors (H, d_in, d_out)), S_0 = 0, at the start of a chunk."""
        start = tuple(w.to(dtype or w.dtype).expand(batch, *w.shape) for w in weights)
        zero = tuple(torch.zeros_like(w) for w in start)
        return MemoryState(start, zero, start, torch.zeros(batch, dtype=torch.int64))
