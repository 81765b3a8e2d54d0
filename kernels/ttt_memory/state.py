"""State that TTT's memory carries from one call to the next, and the network that its weights belong to."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.memory.state import choose

EPS = 1e-6
"""The LayerNorm's epsilon, as in the authors' code."""

Parameters = tuple[Tensor, ...]
"""W1, b1, or W1, b1, W2, b2: weights (..., d_in, d_out) and biases (..., d_out)."""


@dataclass
class TTTState:
    """State after any number of tokens, of constant size. A sequence may be cut at any token.

    A token's weights are those at the start of its mini-batch, minus tau_t times the sum of the gradients since. The
    state keeps both parts.

    start: W1, b1, or W1, b1, W2, b2, (B, H, d_in, d_out) and (B, H, d_out), fp32 (fp64 for fp64 inputs): the
        parameters at the start of the current mini-batch.
    sums: same shapes: learning rate times gradient, summed over its tokens read so far (0 when offset is 0).
    offset: (B,) int64, tokens read of the current mini-batch, 0 <= offset < C.
    """

    start: Parameters
    sums: Parameters
    offset: Tensor

    @staticmethod
    def initial(begin: Parameters) -> "TTTState":
        """Return the state at the start of a mini-batch with the parameters ``begin`` (B, H, ...)."""
        zero = tuple(torch.zeros_like(p) for p in begin)
        return TTTState(begin, zero, torch.zeros(len(begin[0]), dtype=torch.int64))

    def to(self, x: Tensor) -> "TTTState":
        """Convert to x's dtype and device. Sums become exactly 0 in rows whose offset is 0, whatever they were."""
        start, sums = ([p.to(x) for p in group] for group in (self.start, self.sums))
        zero = [torch.zeros_like(s) for s in sums]
        return TTTState(tuple(start), choose(self.offset.to(x.device) == 0, zero, sums), self.offset)


def network(x: Tensor, parameters: Parameters, norm: Parameters) -> Tensor:
    """x + LN(f(x)); x (..., c, D), parameters (..., d_in, d_out) and (..., d_out), norm two (H, D)."""
    y = x
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        if weight is not parameters[0]:
            y = F.gelu(y, approximate="tanh")
        y = y @ weight + bias.unsqueeze(-2)
    gain, shift = (p.unsqueeze(-2) for p in norm)
    return x + F.layer_norm(y, y.shape[-1:], eps=EPS) * gain + shift
