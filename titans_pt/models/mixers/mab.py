"""MAB, memory beside attention: a memory is added to a pretrained attention layer, and has no effect at first."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Section
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


class MABSettings(Section):
    join: Literal["mixed", "added"] = "mixed"
    """Join of attention and memory. mixed: each head's output moves from attention towards the memory by a learned
    share, as full attention moves from the window towards the tokens beyond it. The output projection is attention's;
    the memory has as many heads as attention, equally wide. added: the memory's output is added, through an output
    projection of its own, and its heads together are as wide as the model."""


@dataclass
class MABState:
    attention: AttentionState
    memory: AnyMemoryState


@MIXERS.register
class MAB(BesideAttention, WindowedMemoryMixer):
    """Window attention a = window_attention(x) and a memory m = memory(x) beside it, for ``titans convert``:

        join="mixed": out(a + s (m - a)), s = memory_share(x), one number for each head of each token
        join="added": out(a) + memory_out(m)

    memory_share and memory_out start at 0, so that the layer starts as its window. Full attention has the first form:
    it is a + s (f - a), where f is attention to the tokens beyond the window, and s their share of the softmax.

    MAG cannot serve: it normalises both branches and mixes them, which changes a pretrained layer before anything is
    learned. Attention's parameters have the same names as in the mixers attention and swa. The memory is linear by
    default, without a LayerNorm: M(k) = v then has the size of attention's values.
    """

    name = "mab"
    Settings = MABSettings
    shared = ("n_heads", "rope_base", "attention", *PROJECTED)
    sharding = {"memory_share": Shard.ENTER_COLUMN, "out": Shard.LAST_ROW, "memory_out": Shard.LAST_ROW}
    ends = ("out",)

    def __init__(self, config: ModelConfig):
        super().__init__()
        settings = self.settings(config)
        self.attention = Attention(config, config.window)
        self.out = nn.Linear(self.attention.width, config.d_model, bias=False)
        self.memory = build_memory(config, config.head_width if settings.join == "mixed" else None)
        self.memory_share = self.memory_out = None
        if settings.join == "mixed":
            self.memory_share = nn.Linear(config.d_model, config.n_heads)
        else:
            self.memory_out = nn.Linear(config.d_model, config.d_model, bias=False)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        linear = {"model.memory.depth": 1, "model.memory.norm": False, "model.memory.residual": False}
        found = super().defaults(config, length) | linear | {"model.memory.projections": "affine"}
        return found if config.memory_heads == config.n_heads else found | {"model.mab.join": "added"}

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        settings, model = cls.settings(config.model), config.model
        need(
            settings.join == "added" or model.memory_heads == model.n_heads,
            "model.mab.join",
            settings.join,
            f"must be added: the memory has {model.memory_heads} heads for attention's {model.n_heads}",
        )

    def own_initialisation(self):
        for layer in (self.memory_share, self.memory_out):
            if layer is not None:
                nn.init.zeros_(layer.weight)

    def forward(
        self, x: Tensor, state: MABState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MABState]:
        a, attention = self.attention(x, state and state.attention, documents)
        m, memory = self.memory(x, state.memory if state else None, documents)
        after = MABState(attention, memory)
        if self.memory_out is not None:
            return self.out(a) + self.memory_out(m), after
        assert self.memory_share is not None
        share = self.memory_share(x).to(a.dtype).unsqueeze(-1)
        a, m = (y.unflatten(-1, (share.shape[-2], -1)) for y in (a, m.to(a.dtype)))
        return self.out(torch.lerp(a, m, share).flatten(-2)), after

    def flops(self, length: int) -> Flops:
        layers = [self.out] + [layer for layer in (self.memory_share, self.memory_out) if layer is not None]
        attention = self.attention.flops(self.attention.seen(length)) + self.memory.flops(length)
        return sum(map(linear_flops, layers), attention)
