"""DeltaProduct: Gated DeltaNet that writes several keys per token (Siems et al., arXiv 2502.10297)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, product
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, SelectiveDecay, precise, unit_length
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import PROJECTED
from titans_pt.models.mixers.recurrent import CONVOLVED, ExpansionMixer, linear


@MIXERS.register
class DeltaProduct(ExpansionMixer):
    """Gated DeltaNet with n keys, values and betas per token: S = H_n ... H_1 exp(g) S + the writes of all n, with
    H_i = I - beta_i k_i k_i^T. A token decays once, before its first write, and reads after its last.

    A head's n keys lie side by side in the outputs of its linear layer and pass one convolution along time.
    """

    name = "deltaproduct"
    shared = PROJECTED
    write_gate = "beta"
    delta = True

    class Settings(Section):
        n_heads: Positive = 6
        """Number of heads. The default is lowered until the heads divide the widths of keys and values."""
        key_expansion: Annotated[float, Field(gt=0.0)] = 0.75
        """Width of all queries, and of all keys of one write, over model.d_model."""
        value_expansion: Annotated[float, Field(gt=0.0)] = 1.5
        """Width of all values of one write, and of the gate, over model.d_model."""
        writes: Positive = 2
        """Keys that a token writes, each correcting the one before (n_h in the paper). The transition of a token is a
        product of as many Householder-like matrices. 1 with allow_neg_eigval=false is Gated DeltaNet."""
        forget_gate: bool = True
        """A decay per token and head (Gated DeltaProduct); false: none (DeltaProduct)."""
        allow_neg_eigval: bool = True
        """beta between 0 and 2, as in the paper, instead of 0 and 1: transitions with eigenvalues down to -1, and with
        two writes rotations, which state tracking needs."""

    sharding = CONVOLVED | {"beta": Shard.COLUMN, "step": Shard.COLUMN, "gate": Shard.COLUMN}

    def __init__(self, config: ModelConfig):
        d, settings = config.d_model, self.settings(config)
        keys, values = (round(width) for width in self.widths(config).values())
        super().__init__(config, keys // settings.n_heads, values // settings.n_heads)
        self.writes = n = settings.writes
        self.largest_beta = 2.0 if settings.allow_neg_eigval else 1.0
        self.make_convolved(config, keys, n * keys, n * values)
        self.beta = linear(d, n * self.n_heads)
        self.forgets = settings.forget_gate
        if self.forgets:
            self.decay = "token"
            self.step, self.decays = linear(d, self.n_heads), SelectiveDecay(self.n_heads, lowest=0)
        else:
            self.register_module("step", None)
            self.register_module("decays", None)
        self.gate = linear(d, values)
        self.norm = RMSNorm(self.value_width, eps=config.norm_eps)
        self.out = linear(values, d)

    def in_turn(self, x: Tensor) -> Tensor:
        """(B, T, H n W) -> (B, T n, H, W): a token's writes one after the other."""
        return x.unflatten(-1, (self.n_heads, self.writes, -1)).transpose(2, 3).flatten(1, 2)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        (q, k, v), inputs = self.convolved(x, state, documents)
        q = unit_length(self.split(q)) * self.key_width**-0.5
        k, v = unit_length(self.in_turn(k)), self.in_turn(v)
        beta = self.largest_beta * torch.sigmoid(precise(self.in_turn(self.beta(x)).squeeze(-1)))
        decay = self.decays(self.step(x))[1] if self.forgets else None
        y, memory = self.remember(q, k, v, decay, beta, state, documents)
        y = self.norm(y) * F.silu(self.split(self.gate(x)))
        return self.out(y.flatten(-2)), RecurrentState(memory, inputs)

    def flops(self, length: int) -> Flops:
        """Its linear layers, one read, and for each write the read before the correction and the write itself."""
        return linear_flops(self) + self.n_heads * (1 + 2 * self.writes) * product(self.key_width, self.value_width)
