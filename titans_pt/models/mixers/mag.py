"""MAG: sliding-window attention beside the memory, both over [persistent | x], gating each other."""

from dataclasses import dataclass

from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import NeuralMemoryState
from titans_pt.models.mixers.common import BranchGate, build_memory, persistent, remember


@dataclass
class MAGState:
    attention: AttentionState
    memory: NeuralMemoryState


class MAG(nn.Module):
    """out(gate(window_attention([persistent | x]), memory([persistent | x])))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.persistent = persistent(config)
        self.attention = Attention(config.d_model, config.n_heads, config.rope_base, config.window)
        self.memory = build_memory(config)
        self.gate = BranchGate(config)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: MAGState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MAGState]:
        prefix = None if self.persistent is None else self.persistent[None]
        a, attention = self.attention(x, state and state.attention, documents, prefix)
        m, memory = remember(self.memory, x, self.persistent, state and state.memory, documents)
        return self.out(self.gate(x, a, m)), MAGState(attention, memory)
