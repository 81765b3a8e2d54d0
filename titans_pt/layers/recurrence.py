"""Parts that layers around a linear recurrence share: its state, unit keys, and the decay of selective state spaces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titans_pt.kernels.memory.state import state_dtype
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import counted_together, join_parts, take_parts


@dataclass
class RecurrentState:
    """memory: (B, H, K, V) or (B, channels, N), fp32 (fp64 for fp64 inputs).
    inputs: the newest conv_width - 1 inputs of each convolution, (B, conv_width - 1, width).
    position, behind: tokens read so far, see titans_pt.layers.state.counted_together.
    """

    memory: Tensor
    inputs: tuple[Tensor, ...] = ()
    position: int = 0
    behind: Tensor | None = None

    @staticmethod
    def join_rows(states: "Sequence[RecurrentState]", place: str) -> "RecurrentState":
        """See titans_pt.layers.state.join_rows."""
        return join_parts(counted_together(states), place)

    def take_rows(self, index: Tensor) -> "RecurrentState":
        """See titans_pt.layers.state.take_rows."""
        return counted_together([take_parts(self, index)])[0]

    def of_inputs(self, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The inputs, which must have these ``shapes``.

        Raises:
            ValueError: they have others: the state is another mixer's.
        """
        given, own = [tuple(x.shape) for x in self.inputs], [tuple(shape) for shape in shapes]
        if given != own:
            raise ValueError(f"state: given one of another mixer, with inputs {given}; this one's are {own}")
        return self.inputs


def precise(x: Tensor, copy: bool = False) -> Tensor:
    """Converts to the precision of states: fp64 stays, all else becomes fp32. copy: also if it has that precision."""
    return x.to(state_dtype(x), copy=copy)


def varying(number: float) -> Tensor:
    """A number that changes during training: an fp64 scalar on the CPU, which combines with tensors of any device.

    torch.compile takes it as an input. It would take a Python float as a constant, and compile the block again for
    every value.
    """
    return torch.tensor(number, dtype=torch.float64, device="cpu")  # even if the model is built on "meta"


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) along the last dimension, in x's dtype."""
    wide = precise(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x). Not torch's own: torch.compile expects its gradient in another memory layout than it comes in."""
    return torch.logaddexp(x, x.new_zeros(()))


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def random_steps(n: int) -> Tensor:
    """Numbers (n,) that softplus turns into steps between 0.001 and 0.1, uniform in their logarithm, as in Mamba."""
    return inverse_softplus(torch.exp(torch.empty(n).uniform_(math.log(1e-3), math.log(0.1))).clamp(min=1e-4))


class SelectiveDecay(nn.Module):
    """x (B, T, H) -> step s = softplus(x + dt_bias) and log decay -exp(A_log) s, (B, T, H) in the state's precision.

    Mamba2 (arXiv 2405.21060) and Gated DeltaNet (arXiv 2412.06464): one decay per token and head. With a ``width``, one
    per token, head and key channel, (B, T, H, width) (KDA, arXiv 2510.26692): dt_bias is per channel, A_log per head.
    exp(A_log) starts uniform between ``lowest`` and 16.
    """

    sharding = {"": Shard.COLUMN}
    no_decay = ("A_log", "dt_bias")

    def __init__(self, n_heads: int, lowest: float, width: int | None = None):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads).uniform_(lowest, 16).clamp(min=1e-4).log())
        steps = random_steps(n_heads * (width or 1))
        self.dt_bias = nn.Parameter(steps if width is None else steps.view(n_heads, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = softplus(precise(x) + precise(self.dt_bias))
        rate = precise(self.A_log).exp()
        return step, -(rate if self.dt_bias.dim() == 1 else rate.unsqueeze(-1)) * step
