"""MAL: the memory as a layer of its own, then sliding-window attention on its output."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import NeuralMemoryState
from titans_pt.models.mixers.common import build_memory, persistent


@dataclass
class MALState:
    memory: NeuralMemoryState
    attention: AttentionState


class MAL(nn.Module):
    """m = memory_out(memory(x) * sigmoid(gate(x))); m + out(window_attention(norm(x + m))), over [persistent | x].

    A sigmoid for LMM's reason. Two layers, "residual connections throughout": attention sees the token beside what
    was remembered of it, and what was remembered goes on beside what attention makes of it. Through attention alone,
    which starts as a mean over the window, next to nothing of it arrives, and recall is not learned (docs/notebook.md).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.persistent = persistent(config)
        self.memory = build_memory(config)
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.memory_out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config.d_model, config.n_heads, config.rope_base, config.window)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: MALState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MALState]:
        prefix = start = None
        if self.persistent is not None and (state is None or documents is not None):
            tokens = self.persistent[None]
            remembered, start = self.memory.start_after(tokens)
            prefix = self.norm(tokens + self._recalled(tokens, remembered))
        m, memory = self.memory(x, state and state.memory, documents, start=start)
        m = self._recalled(x, m)
        a, attention = self.attention(self.norm(x + m), state and state.attention, documents, prefix)
        return m + self.out(a), MALState(memory, attention)

    def _recalled(self, x: Tensor, m: Tensor) -> Tensor:
        return self.memory_out(m * torch.sigmoid(self.gate(x)))
