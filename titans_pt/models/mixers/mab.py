"""MAB, memory beside attention: what a pretrained attention layer lacks is added to it, and begins as nothing."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Section
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import (
    AnyMemoryState,
    BesideAttention,
    WindowedMemoryMixer,
    build_memory,
)


class MABSettings(Section):
    attention_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of training samples, drawn for each layer and step, whose layer has no output of attention: the memory must
    then know what it could leave to the window."""


@dataclass
class MABState:
    attention: AttentionState
    memory: AnyMemoryState


@MIXERS.register
class MAB(BesideAttention, WindowedMemoryMixer):
    """out(window_attention(x)) + memory_out(memory(x)); memory_out starts at 0, so that the layer starts as its window.

    For ``titans convert``. MAG cannot serve: it normalises both branches and mixes them, which changes a pretrained
    layer before anything is learned. The names of attention's parameters are those of the mixers attention and swa.
    """

    name = "mab"
    Settings = MABSettings
    sharding = {"out": Shard.LAST_ROW, "memory_out": Shard.LAST_ROW}
    ends = ("out", "memory_out")

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_dropout = self.settings(config).attention_dropout
        self.attention = Attention(config, config.window)
        self.out = nn.Linear(self.attention.width, config.d_model, bias=False)
        self.memory = build_memory(config)
        self.memory_out = nn.Linear(config.d_model, config.d_model, bias=False)

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        share, name = cls.settings(config.model).attention_dropout, "model.mab.attention_dropout"
        need(
            not (share and config.train.activation_checkpointing),
            name,
            share,
            "must be 0 with train.activation_checkpointing, which would draw again",
        )

    def own_initialisation(self):
        nn.init.zeros_(self.memory_out.weight)

    def forward(
        self, x: Tensor, state: MABState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MABState]:
        a, attention = self.attention(x, state and state.attention, documents)
        m, memory = self.memory(x, state.memory if state else None, documents)
        if self.training and self.attention_dropout:
            # All tensor ranks draw the same numbers: a step seeds the generator (training/loop.py).
            a = a * (torch.rand(len(a), 1, 1, device=a.device) >= self.attention_dropout)
        return self.out(a) + self.memory_out(m), MABState(attention, memory)

    def flops(self, length: int) -> Flops:
        attention = self.attention.flops(self.attention.seen(length)) + linear_flops(self.out)
        return attention + self.memory.flops(length) + linear_flops(self.memory_out)
