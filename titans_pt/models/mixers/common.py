"""What mixers share: the window's check, the memory mixers' base, persistent tokens, the gate between two branches."""

import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.memory import NeuralMemory, NeuralMemoryState
from titans_pt.models.mixers.base import Mixer, Need


def check_attention(config: Config, need: Need):
    """What a mixer with rotary attention calls in its :meth:`Mixer.check`."""
    width, heads = config.model.d_model, config.model.n_heads
    need(width % heads == 0, "model.n_heads", heads, f"must divide model.d_model={width}")
    need((width // heads) % 2 == 0, "model.n_heads", heads,
         f"head width d_model / n_heads = {width // heads} must be even for RoPE")


def check_window(config: Config, need: Need):
    """What a mixer with attention over ``model.window`` calls in its :meth:`Mixer.check`."""
    check_attention(config, need)
    length = config.data.seq_len
    need(config.model.window <= length, "model.window", config.model.window,
         f"at most data.seq_len={length}; a wider window never fills: lower it, or raise data.seq_len")


class MemoryMixer(Mixer):
    """A mixer around one :class:`NeuralMemory`, its attribute ``memory``."""

    memory: NeuralMemory

    @classmethod
    def check(cls, config: Config, need: Need):
        model = config.model
        heads = "model.memory.n_heads" if model.memory.n_heads else "model.n_heads"
        need(model.d_model % model.memory_heads == 0, heads, model.memory_heads,
             f"must divide model.d_model={model.d_model}")
        need(model.memory_heads < model.d_model or not model.memory.norm, heads, model.memory_heads,
             f"at most model.d_model / 2 = {model.d_model // 2}: the LayerNorm of a head of width 1 is constant")
        chunk, length = model.memory.chunk_size, config.data.seq_len
        need(chunk <= length, "model.memory.chunk_size", chunk,
             f"at most data.seq_len={length}; in a longer chunk every gradient is taken at the memory's start")

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        return super().split_sizes(config) | {"model.memory.n_heads": config.memory_heads}

    def unserved(self, dtype: torch.dtype) -> str | None:
        return self.memory.unserved(dtype)

    def scratch_bytes(self) -> int:
        return self.memory.scratch_bytes()

    def kept_state_bytes(self, length: int) -> int:
        return self.memory.kept_state_bytes(length)


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

    x, a, b, o: (B, T, d_model). How its norms are cut is the mixer's to declare.
    """

    per_rank = ("n_heads",)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.memory_heads
        self.d_model = config.d_model
        self.norm_a = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.norm_b = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.linear = nn.Linear(config.d_model, self.n_heads, bias=False)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = (y.unflatten(-1, (self.n_heads, -1)) for y in (self.norm_a(a), self.norm_b(b)))
        share = torch.sigmoid(self.linear(x)).unsqueeze(-1)
        return torch.lerp(a, b, share.to(a.dtype)).flatten(-2)

    def flops(self) -> Flops:
        return product(self.d_model, self.n_heads)
