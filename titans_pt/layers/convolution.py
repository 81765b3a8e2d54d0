"""Causal depthwise convolution over time."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.layers.documents import Documents


class ShortConvolution(nn.Module):
    """y_t = sum_l w_l * x_{t-l} (+ b), l < width, one filter per channel; width 1 leaves x as it is.

    The state is the last width - 1 inputs, (B, width - 1, channels), zeros before a document's start.
    """

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        self.width = width
        self.register_parameter("bias", None)
        if width > 1:
            bound = width**-0.5
            self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
            if bias:
                self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def forward(
        self, x: Tensor, state: Tensor | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (B, T, channels) -> the same shape, and the new state."""
        past = self.width - 1
        if state is None:
            state = x.new_zeros(x.shape[0], past, x.shape[2])
        if past == 0:
            return x, state
        padded = torch.cat([state.to(x.dtype), x], 1)
        if documents is None and torch.compiler.is_compiling():
            # Sums of products fuse with what follows (SiLU, unit length) into one kernel; a convolution does not.
            taps = (padded[:, past - lag : past - lag + x.shape[1]] for lag in range(self.width))
            y = sum(tap * self.weight[:, past - lag] for lag, tap in enumerate(taps))
            return y if self.bias is None else y + self.bias, padded[:, -past:]
        if documents is None:
            filters = self.weight.unsqueeze(1)
            y = F.conv1d(padded.transpose(1, 2), filters, self.bias, groups=x.shape[2]).transpose(1, 2)
            return y, padded[:, -past:]

        # Where each input's document begins in the padded row; inputs before it are not seen.
        place = torch.arange(padded.shape[1], device=x.device)
        start = torch.where(documents.begin < 0, 0, documents.begin + past)
        y = torch.zeros_like(x) if self.bias is None else self.bias.expand_as(x)
        for lag in range(self.width):
            seen = place[past:] - lag >= start
            tap = padded[:, past - lag : past - lag + x.shape[1]]
            y = y + torch.where(seen[..., None], tap, 0.0) * self.weight[:, past - lag]
        seen = place[-past:] >= start[:, -1:]
        return y, torch.where(seen[..., None], padded[:, -past:], 0.0)
