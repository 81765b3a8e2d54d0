"""What the memory mixers share: persistent tokens, and the gate between two branches."""

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.documents import Documents
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
    documents: Documents | None,
) -> tuple[Tensor, NeuralMemoryState]:
    """The memory along [persistent | x]; the persistent tokens are written only where something can begin."""
    start = None
    if tokens is not None and (state is None or documents is not None):
        _, start = memory.start_after(tokens[None])
    return memory(x, state, documents, start=start)


class BranchGate(nn.Module):
    """o = s * b + (1 - s) * a, s = sigmoid(linear(x)): how much of each of two branches, one s a token and head.

    Titans, Section 4.2 has a product of the branches, each normalised with a learned vector, and a non-linearity; the
    rest is not published. A product multiplies what the memory (b) recalls by whatever attention (a) has at that
    token: with one, even one that is learned from zero beside the sum, recall stays at 31 % (docs/notebook.md).

    x, a, b, o: (B, T, d_model).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.memory_heads
        self.norm_a = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.norm_b = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.linear = nn.Linear(config.d_model, self.n_heads, bias=False)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = (y.unflatten(-1, (self.n_heads, -1)) for y in (self.norm_a(a), self.norm_b(b)))
        share = torch.sigmoid(self.linear(x)).unsqueeze(-1)
        return torch.lerp(a, b, share.to(a.dtype)).flatten(-2)
