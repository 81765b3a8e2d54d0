"""State that the memory carries from one call to the next."""

from dataclasses import dataclass

import torch
from torch import Tensor

Weights = tuple[Tensor, ...]


def state_dtype(x: Tensor) -> torch.dtype:
    """Memory states are fp32 whatever the dtype of what they read, fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def choose(rows: bool | Tensor, yes: Weights, no: Weights) -> Weights:
    """Row by row ``yes`` or ``no``, tensors (N, ...); rows: bool (N,), or True for all."""
    if rows is True:
        return tuple(yes)
    return tuple(torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(yes, no, strict=True))


@dataclass
class MemoryState:
    """State after any number of tokens; constant in their number. Makes a cut at any token invisible.

    The gradient of a token is taken at the weights of its chunk's START. A cut inside a chunk must carry those beside
    the current ones: three weight sets and one counter, no buffered tokens.

    weights: L tensors (B, H, d_in, d_out), fp32 (fp64 for fp64 inputs): M_t.
    momentum: same shapes: S_t.
    chunk_weights: same shapes: M at the start of the current chunk (equal to ``weights`` when offset is 0).
    offset: (B,) int64, tokens already read of the current chunk, 0 <= offset < chunk_size.
    recent: of a rule with a window, what it keeps of the newest tokens (kernels/memory/window.py), (B, H, w, .) each.
    """

    weights: Weights
    momentum: Weights
    chunk_weights: Weights
    offset: Tensor
    recent: tuple[Tensor, ...] = ()

    def to(self, dtype: torch.dtype) -> "MemoryState":
        """The same in another dtype, such as for a layer in fp32 after one in fp64: C and the GPU's kernels take
        addresses as they are."""
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
