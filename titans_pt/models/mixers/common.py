"""What the memory mixers share: persistent tokens, and the gate between two branches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.memory import NeuralMemory, NeuralMemoryState


def build_memory(config: ModelConfig) -> NeuralMemory:
    return NeuralMemory(config.d_model, config.memory_heads, config.conv_width, config.memory, config.norm_eps)


def persistent(config: ModelConfig) -> nn.Parameter | None:
    """Learned tokens (P, d_model) of unit scale, as the normalised sequence they stand before; None for P = 0."""
    if config.persistent_tokens == 0:
        return None
    return nn.Parameter(torch.randn(config.persistent_tokens, config.d_model))


def remember(
    memory: NeuralMemory,
    x: Tensor,
    tokens: Tensor | None,
    state: NeuralMemoryState | None,
    reset: Tensor | None,
) -> tuple[Tensor, NeuralMemoryState]:
    """The memory along [persistent | x]; the persistent tokens are written only where something can begin."""
    start = None
    if tokens is not None and (state is None or reset is not None):
        _, start = memory.start_after(tokens[None])
    return memory(x, state, reset, start=start)


class BranchGate(nn.Module):
    """o = a + b + product * a * silu(b), two branches (B, T, d_model) that gate each other, each normalised first.

    Titans, Section 4.2: both are normalised with learned vectors, then a non-linearity; the rest is not published.
    ``product`` is a learned vector that starts at 0: the product multiplies what the memory recalls by whatever
    attention has at that token, and where it is there from the start recall stays at 30 % (docs/notebook.md).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm_a = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.norm_b = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.product = nn.Parameter(torch.zeros(config.d_model))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.norm_a(a), self.norm_b(b)
        return a + b + self.product * a * F.silu(b)
