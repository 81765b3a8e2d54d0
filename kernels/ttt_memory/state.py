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
    """State after any number of tokens; constant in their number. Makes a cut at any token invisible.

    Both parts are kept: a token's weights are those of its mini-batch's start, less tau_t times the sum of the
    gradients since.

    start: W1, b1, or W1, b1, W2, b2, (B, H, d_in, d_out) and (B, H, d_out), fp32 (fp64 for fp64 inputs): the
        parameters at the start of the current mini-batch.
    sums: same shapes: learning rate times gradient, summed over the tokens read of it (0 when offset is 0).
    offset: (B,) int64, tokens read of the current mini-batch, 0 <= offset < C.
    """

    start: Parameters
    sums: Parameters
    offset: Tensor

    @staticmethod
    def initial(begin: Parameters) -> "TTTState":
        """begin (B, H, ...), at the start of a mini-batch."""
        zero = tuple(torch.zeros_like(p) for p in begin)
        return TTTState(begin, zero, torch.zeros(len(begin[0]), dtype=torch.int64))

    def to(self, x: Tensor) -> "TTTState":
        """Parameters in x's dtype and on its device; sums exactly 0 where the offset is, whatever they were."""
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
