"""MAB, memory beside attention: a memory mixed into a pretrained attention layer; it has no effect at first."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import (
    PROJECTED,
    AnyMemoryState,
    BesideAttention,
    WindowedMemoryMixer,
    build_memory,
)


@dataclass
class MABState:
    attention: AttentionState
    memory: AnyMemoryState


@MIXERS.register
class MAB(BesideAttention, WindowedMemoryMixer):
    """Window attention a = window_attention(x) and a memory m = memory(x) beside it, for ``titans convert``:

        out(a + s (m - a)), s = memory_share(x), one number for each head of each token

    memory_share starts at 0, so that the layer starts as its window. Full attention has the same form: it is
    a + s (f - a), where f is attention to the tokens beyond the window, and s their share of the softmax. The memory
    has as many heads as attention, equally wide. The projections to its queries, keys and values have biases and no
    SiLU: values of a pretrained head have both signs, and its keys share a large mean, which a bias subtracts.

    MAG cannot serve: it normalises both branches and mixes them, which changes a pretrained layer before anything is
    learned. Attention's parameters have the same names as in the mixers attention and swa. The memory is linear by
    default, without a LayerNorm: M(k) = v then has the size of attention's values.
    """

    name = "mab"
    shared = ("n_heads", "rope_base", "attention", *PROJECTED)
    sharding = {"memory_share": Shard.ENTER_COLUMN, "out": Shard.LAST_ROW}
    ends = ("out",)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = Attention(config, config.window)
        self.out = nn.Linear(self.attention.width, config.d_model, bias=False)
        self.memory = build_memory(config, config.head_width, affine=True)
        self.memory_share = nn.Linear(config.d_model, config.n_heads)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        linear = {"model.memory.depth": 1, "model.memory.norm": False, "model.memory.residual": False}
        return super().defaults(config, length) | linear

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        need(
            config.model.memory_heads == config.model.n_heads,
            "model.memory.n_heads",
            config.model.memory.n_heads,
            f"must be model.n_heads={config.model.n_heads}: mab mixes each head of the memory with one of attention's; "
            "leave it out",
        )

    def own_initialisation(self):
        nn.init.zeros_(self.memory_share.weight)

    def forward(
        self, x: Tensor, state: MABState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MABState]:
        a, attention = self.attention(x, state and state.attention, documents)
        m, memory = self.memory(x, state.memory if state else None, documents)
        share = self.memory_share(x).to(a.dtype).unsqueeze(-1)
        a, m = (y.unflatten(-1, (share.shape[-2], -1)) for y in (a, m.to(a.dtype)))
        return self.out(torch.lerp(a, m, share).flatten(-2)), MABState(attention, memory)

    def flops(self, length: int) -> Flops:
        both = self.attention.flops(self.attention.seen(length)) + self.memory.flops(length)
        return both + linear_flops(self.out) + linear_flops(self.memory_share)
