"""Linear attention: a matrix per head that adds up k v^T (Katharopoulos et al., arXiv 2006.16236)."""

import torch.nn.functional as F
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.recurrent import HeadWidthMixer, linear


@MIXERS.register
class LinearAttention(HeadWidthMixer):
    """q, k through elu + 1, q scaled by K^-1/2; an RMSNorm per head replaces the paper's denominator, as in
    flash-linear-attention (and arXiv 2210.10340, which shows that the denominator is unstable)."""

    name = "linear_attention"
    shared = ("norm_eps", "init_std", "n_layers")

    class Settings(Section):
        head_width: Positive = 64
        """Width of a head's queries, keys and values, for model.d_model / head_width heads. The default is lowered
        until it divides model.d_model."""

    sharding = {
        "": Shard.ENTER,
        "q": Shard.COLUMN,
        "k": Shard.COLUMN,
        "v": Shard.COLUMN,
        "norm": Shard.SUMMED,
        "out": Shard.LAST_ROW,
    }

    def __init__(self, config: ModelConfig):
        d, width = config.d_model, self.settings(config).head_width
        super().__init__(config, width, width)
        self.q, self.k, self.v = (linear(d, d) for _ in "qkv")
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.out = linear(d, d)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        # elu(y) + 1. Not F.elu: torch.compile expects its gradient in another memory layout than it comes in.
        q, k = (F.relu(y) + y.clamp(max=0).exp() for y in (self.split(self.q(x)), self.split(self.k(x))))
        y, memory = self.remember(q * self.key_width**-0.5, k, self.split(self.v(x)), None, None, state, documents)
        return self.out(self.norm(y).flatten(-2)), RecurrentState(memory)
