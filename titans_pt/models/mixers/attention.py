"""Transformer++ (Llama-like): rotary softmax attention, full or in a sliding window."""

from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents


class AttentionMixer(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None):
        super().__init__()
        self.attention = Attention(config.d_model, config.n_heads, config.rope_base, window)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, AttentionState]:
        y, state = self.attention(x, state, documents)
        return self.out(y), state
