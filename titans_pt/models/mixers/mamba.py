"""Mamba: a selective state space with a state per channel (Gu and Dao, arXiv 2312.00752)."""

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.recurrence import precise, random_steps, softplus
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.selective import SelectiveMixer


@MIXERS.register
class Mamba(SelectiveMixer):
    """step = softplus(.), decay exp(-exp(A_log) step) of each channel and entry; exp(A_log) starts at 1 .. N."""

    name = "mamba"
    sharding = SelectiveMixer.sharding | {"A_log": Shard.COLUMN}
    no_decay = ("A_log", "D")

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.A_log = nn.Parameter(torch.arange(1.0, self.states + 1).log().repeat(self.x.out_features, 1))

    def own_initialisation(self):
        with torch.no_grad():
            self.inputs.step.bias.copy_(random_steps(self.x.out_features))

    def steps(self, raw: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
        return softplus(raw), precise(self.A_log).exp()
