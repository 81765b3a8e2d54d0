"""Gated DeltaNet-2: erasing and writing have gates of their own, channel by channel (arXiv 2605.22791)."""

import torch
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.kda import ChannelDeltaMixer
from titans_pt.models.mixers.recurrent import linear


@MIXERS.register
class GDN2(ChannelDeltaMixer):
    """KDA with b = sigmoid(W_b x) per key channel and w = sigmoid(W_w x) per value channel in beta's place:
    S = (I - k (b * k)^T) diag(decay) S + k (w * v)^T.

    The transition is no contraction: the norm of I - k (b * k)^T reaches 1.13 with b below 1. The output gate is a
    sigmoid, as in KDA and in flash-linear-attention's layer; the authors' code has SiLU.
    """

    name = "gdn2"
    write_gate = "written"
    erases = True

    class Settings(Section):
        head_width: Positive = 128
        """Width of a head's queries, keys and values, for model.d_model / head_width heads. The default is lowered
        until it divides model.d_model."""
        allow_neg_eigval: bool = False
        """Range of the erasing gate: between 0 and 2 instead of 0 and 1, for negative eigenvalues of the transition
        (arXiv 2411.12537)."""

    sharding = ChannelDeltaMixer.sharding | {"erase": Shard.COLUMN, "written": Shard.COLUMN}

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.erase, self.written = (linear(config.d_model, config.d_model) for _ in range(2))

    def write(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        erase = self.strongest * torch.sigmoid(self.split(self.erase(x)))
        return torch.sigmoid(self.split(self.written(x))) * v, None, erase * k
