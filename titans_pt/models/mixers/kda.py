"""Kimi Delta Attention: Gated DeltaNet with a decay for every key channel (Kimi Team, arXiv 2510.26692)."""

import torch
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, SelectiveDecay, precise, unit_length
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import PROJECTED
from titans_pt.models.mixers.recurrent import CONVOLVED, HeadWidthMixer, linear


class ChannelDeltaMixer(HeadWidthMixer):
    """Common base of KDA and Gated DeltaNet-2: all but the strength of erasing and writing (:meth:`write`).

    q, k, v each through a convolution and SiLU; q and k of unit length, q scaled by K^-1/2; log decay
    -exp(A_log) softplus(W2 W1 x + dt_bias) per token and key channel, before the error is taken; out(RMSNorm per head *
    sigmoid(W4 W3 x + b)). Both inner widths are the head width.
    """

    shared = PROJECTED
    decay = "channel"
    delta = True

    sharding = CONVOLVED | {
        "decay_in": Shard.SUMMED,
        "decay_out": Shard.COLUMN,
        "gate_in": Shard.SUMMED,
        "gate_out": Shard.COLUMN,
    }

    def __init__(self, config: ModelConfig):
        d, width = config.d_model, self.settings(config).head_width
        super().__init__(config, width, width)
        self.strongest = 2.0 if self.settings(config).allow_neg_eigval else 1.0
        self.make_convolved(config, d, d, d)
        self.decay_in, self.decay_out = linear(d, width), linear(width, d)
        self.decays = SelectiveDecay(self.n_heads, lowest=1, width=width)
        self.gate_in, self.gate_out = linear(d, width), linear(width, d, bias=True)
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.out = linear(d, d)

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x (B, T, d_model), unit keys and values (B, T, H, .) -> values, beta and erase as kernels.linear_memory takes
        them."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        (q, k, v), inputs = self.convolved(x, state, documents)
        q, k, v = map(self.split, (q, k, v))
        q, k = unit_length(q) * self.key_width**-0.5, unit_length(k)
        _, decay = self.decays(self.split(self.decay_out(self.decay_in(x))))
        v, beta, erase = self.write(x, k, v)
        y, memory = self.remember(q, k, v, decay, beta, state, documents, erase)
        y = self.norm(y) * torch.sigmoid(self.split(self.gate_out(self.gate_in(x))))
        return self.out(y.flatten(-2)), RecurrentState(memory, inputs)


@MIXERS.register
class KDA(ChannelDeltaMixer):
    """beta = sigmoid(W x) per token and head, Eq. 1: S = (I - beta k k^T) diag(decay) S + beta k v^T."""

    name = "kda"
    write_gate = "beta"

    class Settings(Section):
        head_width: Positive = 128
        """Width of a head's queries, keys and values, for model.d_model / head_width heads. The default is lowered
        until it divides model.d_model."""
        allow_neg_eigval: bool = False
        """beta between 0 and 2 instead of 0 and 1: the transition I - beta k k^T has eigenvalues down to -1, which
        state tracking needs (arXiv 2411.12537)."""

    sharding = ChannelDeltaMixer.sharding | {"beta": Shard.COLUMN}

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.beta = linear(config.d_model, self.n_heads)

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return v, self.strongest * torch.sigmoid(precise(self.beta(x))), None
