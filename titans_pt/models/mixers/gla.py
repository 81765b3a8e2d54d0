"""Gated linear attention: a decay per token and key channel (Yang et al., arXiv 2312.06635)."""

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, precise
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.recurrent import ExpansionMixer, linear

TEMPERATURE = 16
"""The paper's tau: a gate keeps its sigmoid to the power 1 / 16, and forgets 4 % at the start."""


@MIXERS.register
class GLA(ExpansionMixer):
    """Low-rank log decay logsigmoid(W2 W1 x + b) / 16; out(RMSNorm per head * silu(gate(x)))."""

    name = "gla"
    shared = ("norm_eps", "init_std", "n_layers")
    decay = "channel"

    class Settings(Section):
        n_heads: Positive = 4
        """Number of heads. The default is lowered until the heads divide the widths of keys and values."""
        key_expansion: Annotated[float, Field(gt=0.0)] = 0.5
        """Width of all queries, and of all keys, over model.d_model."""
        value_expansion: Annotated[float, Field(gt=0.0)] = 1.0
        """Width of all values, and of the gate, over model.d_model."""
        gate_rank: Positive = 16
        """Width between the two matrices that make the decay."""

    sharding = {
        "": Shard.ENTER,
        "q": Shard.COLUMN,
        "k": Shard.COLUMN,
        "v": Shard.COLUMN,
        "decay_in": Shard.SUMMED,
        "decay_out": Shard.COLUMN,
        "gate": Shard.COLUMN,
        "norm": Shard.SUMMED,
        "out": Shard.LAST_ROW,
    }

    def __init__(self, config: ModelConfig):
        d, settings = config.d_model, self.settings(config)
        keys, values = (round(width) for width in self.widths(config).values())
        super().__init__(config, keys // settings.n_heads, values // settings.n_heads)
        self.q, self.k, self.v = linear(d, keys), linear(d, keys), linear(d, values)
        self.decay_in, self.decay_out = linear(d, settings.gate_rank), linear(settings.gate_rank, keys, bias=True)
        self.gate = linear(d, values)
        self.norm = RMSNorm(self.value_width, eps=config.norm_eps)
        self.out = linear(values, d)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        decay = F.logsigmoid(precise(self.decay_out(self.decay_in(x)))) / TEMPERATURE
        y, memory = self.remember(q * self.key_width**-0.5, k, v, self.split(decay), None, state, documents)
        y = self.norm(y) * F.silu(self.split(self.gate(x)))
        return self.out(y.flatten(-2)), RecurrentState(memory)
