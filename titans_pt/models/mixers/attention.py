"""Transformer++ (Llama-like): rotary softmax attention over everything before a token."""

from typing import Any, ClassVar

from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops
from titans_pt.layers.sharding import Shard, Sharding
from titans_pt.models.mixers.base import MIXERS, Mixer, Need
from titans_pt.models.mixers.common import check_attention, fitting_attention


@MIXERS.register
class AttentionMixer(Mixer):
    """out(attention(x)); the state grows with the sequence."""

    name = "attention"
    shared = ("n_heads", "rope_base", "attention", "init_std", "n_layers")
    sharding: ClassVar[Sharding | None] = {"out": Shard.LAST_ROW}

    def __init__(self, config: ModelConfig, window: int | None = None):
        super().__init__()
        self.attention = Attention(config, window)
        self.out = nn.Linear(self.attention.width, config.d_model, bias=False)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        return fitting_attention(config)

    @classmethod
    def check(cls, config: Config, need: Need):
        check_attention(config, need)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, AttentionState]:
        y, state = self.attention(x, state, documents)
        return self.out(y), state

    def flops(self, length: int) -> Flops:
        return self.attention.flops(self.attention.seen(length)) + linear_flops(self.out)
