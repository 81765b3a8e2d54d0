"""Gated DeltaNet: DeltaNet that also forgets, by one factor per token and head (Yang et al., arXiv 2412.06464)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, SelectiveDecay, precise, unit_length
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import PROJECTED
from titans_pt.models.mixers.recurrent import CONVOLVED, ExpansionMixer, linear


@MIXERS.register
class GatedDeltaNet(ExpansionMixer):
    """DeltaNet with Mamba2's decay and an output gate: out(RMSNorm per head * silu(gate(x)))."""

    name = "gated_deltanet"
    shared = PROJECTED
    write_gate = "beta"
    delta, decay = True, "token"

    class Settings(Section):
        n_heads: Positive = 6
        """Number of heads. The default is lowered until the heads divide the widths of keys and values."""
        key_expansion: Annotated[float, Field(gt=0.0)] = 0.75
        """Width of all queries, and of all keys, over model.d_model."""
        value_expansion: Annotated[float, Field(gt=0.0)] = 1.5
        """Width of all values, and of the gate, over model.d_model."""
        allow_neg_eigval: bool = False
        """beta between 0 and 2 instead of 0 and 1: the transition I - beta k k^T has eigenvalues down to -1, which
        state tracking needs (arXiv 2411.12537)."""

    sharding = CONVOLVED | {"beta": Shard.COLUMN, "step": Shard.COLUMN, "gate": Shard.COLUMN}

    def __init__(self, config: ModelConfig):
        d, settings = config.d_model, self.settings(config)
        keys, values = (round(width) for width in self.widths(config).values())
        super().__init__(config, keys // settings.n_heads, values // settings.n_heads)
        self.largest_beta = 2.0 if settings.allow_neg_eigval else 1.0
        self.make_convolved(config, keys, keys, values)
        self.beta, self.step = (linear(d, self.n_heads) for _ in range(2))
        self.decays = SelectiveDecay(self.n_heads, lowest=0)
        self.gate = linear(d, values)
        self.norm = RMSNorm(self.value_width, eps=config.norm_eps)
        self.out = linear(values, d)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        (q, k, v), inputs = self.convolved(x, state, documents)
        q, k, v = map(self.split, (q, k, v))
        beta = self.largest_beta * torch.sigmoid(precise(self.beta(x)))
        _, decay = self.decays(self.step(x))
        q = unit_length(q) * self.key_width**-0.5
        y, memory = self.remember(q, unit_length(k), v, decay, beta, state, documents)
        y = self.norm(y) * F.silu(self.split(self.gate(x)))
        return self.out(y.flatten(-2)), RecurrentState(memory, inputs)
