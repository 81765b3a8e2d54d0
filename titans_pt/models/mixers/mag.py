"""MAG: sliding-window attention and the memory side by side, both over [persistent | x], gating each other."""

from dataclasses import dataclass

from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import (
    AnyMemoryState,
    BranchGate,
    GateSettings,
    WindowedMemoryMixer,
    build_memory,
    persistent,
    remember,
)


@dataclass
class MAGState:
    attention: AttentionState
    memory: AnyMemoryState


@MIXERS.register
class MAG(WindowedMemoryMixer):
    """out(gate(window_attention([persistent | x]), memory([persistent | x])))."""

    name = "mag"
    any_width = False
    Settings = GateSettings
    sharding = {
        "persistent": Shard.WHOLE,
        "gate.norm_a": Shard.NORM_OF_ALL_HEADS,
        "gate.norm_b": Shard.NORM_OF_ALL_HEADS,
        "gate.linear": Shard.ENTER_COLUMN,
        "out": Shard.LAST_ROW,
    }

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.persistent = persistent(config)
        self.attention = Attention(config, config.window)
        self.memory = build_memory(config)
        self.gate = BranchGate(config, self.settings(config))
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: MAGState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MAGState]:
        prefix = None if self.persistent is None else self.persistent[None]
        a, attention = self.attention(x, state and state.attention, documents, prefix)
        m, memory = remember(self.memory, x, self.persistent, state.memory if state else None, documents)
        return self.out(self.gate(x, a, m)), MAGState(attention, memory)

    def flops(self, length: int) -> Flops:
        d, prefix = self.out.in_features, 0 if self.persistent is None else len(self.persistent)
        attention = self.attention.flops(self.attention.seen(length) + prefix)
        return self.memory.flops(length) + attention + self.gate.flops() + product(d, d)
