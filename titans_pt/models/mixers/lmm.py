"""LMM: the long-term memory alone as the sequence mixer."""

import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.memory import NeuralMemoryState
from titans_pt.models.mixers.common import build_memory, persistent, remember


class LMM(nn.Module):
    """out(memory([persistent | x]) * silu(gate(x)))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.persistent = persistent(config)
        self.memory = build_memory(config)
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: NeuralMemoryState | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, NeuralMemoryState]:
        y, state = remember(self.memory, x, self.persistent, state, reset)
        return self.out(y * F.silu(self.gate(x))), state
