"""DeltaNet: linear attention that corrects what a key recalls (Yang et al., arXiv 2406.06484)."""

import torch
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, precise, unit_length
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import PROJECTED
from titans_pt.models.mixers.recurrent import CONVOLVED, HeadWidthMixer, linear


@MIXERS.register
class DeltaNet(HeadWidthMixer):
    """q, k, v each through a convolution and SiLU; q and k of unit length, q scaled by K^-1/2; beta = sigmoid(W x);
    an RMSNorm per head."""

    name = "deltanet"
    shared = PROJECTED
    write_gate = "beta"
    delta = True

    class Settings(Section):
        head_width: Positive = 128
        """Width of a head's queries, keys and values, for model.d_model / head_width heads. The default is lowered
        until it divides model.d_model."""
        allow_neg_eigval: bool = False
        """beta between 0 and 2 instead of 0 and 1: the transition I - beta k k^T has eigenvalues down to -1, which
        state tracking needs (arXiv 2411.12537)."""

    sharding = CONVOLVED | {"beta": Shard.COLUMN}

    def __init__(self, config: ModelConfig):
        d, width = config.d_model, self.settings(config).head_width
        super().__init__(config, width, width)
        self.largest_beta = 2.0 if self.settings(config).allow_neg_eigval else 1.0
        self.make_convolved(config, d, d, d)
        self.beta = linear(d, self.n_heads)
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.out = linear(d, d)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        (q, k, v), inputs = self.convolved(x, state, documents)
        q, k, v = map(self.split, (q, k, v))
        beta = self.largest_beta * torch.sigmoid(precise(self.beta(x)))
        q = unit_length(q) * self.key_width**-0.5
        y, memory = self.remember(q, unit_length(k), v, None, beta, state, documents)
        return self.out(self.norm(y).flatten(-2)), RecurrentState(memory, inputs)
