"""Causal depthwise convolution over time."""

import torch
from torch import Tensor, nn

from titans_pt.kernels.convolution import finished, short_convolution
from titans_pt.layers.documents import Documents


class ShortConvolution(nn.Module):
    """y_t = sum_l w_l * x_{t-l} (+ b), l < width, one filter per channel; width 1 leaves x as it is.

    The state is the last width - 1 inputs, (B, width - 1, channels), zeros before a document's start.

    Args:
        of_values: whether it is a mixer's convolution of values (``model.value_filters``).
    """

    def __init__(self, channels: int, width: int, bias: bool = False, of_values: bool = False):
        super().__init__()
        self.width, self.of_values = width, of_values
        self.register_parameter("bias", None)
        if width > 1:
            self.weight = nn.Parameter(torch.empty(channels, width))
            if bias:
                self.bias = nn.Parameter(torch.empty(channels))
            self.begin_at_random()

    @torch.no_grad()
    def begin_at_random(self):
        """Draws filters and bias uniformly within 1 / sqrt(width), as PyTorch's convolution does."""
        bound = self.width**-0.5
        if self.width > 1:
            self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    @torch.no_grad()
    def begin_as_identity(self):
        """Sets the filters to the identity, and the bias to 0."""
        if self.width > 1:
            self.weight.zero_()
            self.weight[:, -1] = 1.0
        if self.bias is not None:
            self.bias.zero_()

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        documents: Documents | None = None,
        silu: bool = False,
        unit: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """x (B, T, channels) -> the same shape, and the new state.

        silu: apply SiLU to the result. unit: then normalise every head of this many channels to unit length; 0: none.
        """
        past = self.width - 1
        if state is None:
            state = x.new_zeros(x.shape[0], past, x.shape[2])
        if past == 0:
            return finished(x, silu, unit), state
        if state.shape != (x.shape[0], past, x.shape[2]):  # the C kernel would read beyond the state's end
            raise ValueError(f"state: given one of a convolution {tuple(state.shape)}; this one's is "
                             f"{(x.shape[0], past, x.shape[2])} (rows, conv_width - 1, channels)")  # fmt: skip
        state = state.to(x.dtype)
        reach = None
        if documents is not None:
            place = torch.arange(x.shape[1], device=x.device)
            reach = torch.where(documents.begin < 0, past, (place - documents.begin).clamp(max=past))
        y = short_convolution(x, state, self.weight, self.bias, reach=reach, silu=silu, unit=unit)
        newest = x[:, -past:] if x.shape[1] >= past else torch.cat([state, x], 1)[:, -past:]
        if reach is not None:  # keep only inputs of the newest token's document
            age = torch.arange(past - 1, -1, -1, device=x.device)
            newest = torch.where((age <= reach[:, -1:])[..., None], newest, 0.0)
        return y, newest
