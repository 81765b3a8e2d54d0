"""Causal depthwise convolution over time."""

import torch
from torch import Tensor, nn

from titans_pt.kernels.convolution import short_convolution
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
        state = state.to(x.dtype)
        if documents is None:
            y = short_convolution(x, state, self.weight, self.bias)
            return y, torch.cat([state, x[:, -past:]], 1)[:, -past:]

        padded = torch.cat([state, x], 1)
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
