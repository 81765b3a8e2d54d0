"""Longhorn: a state space that solves an online regression at every token (Liu et al., arXiv 2407.14207)."""

import torch
from torch import Tensor

from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.selective import SelectiveMixer


@MIXERS.register
class Longhorn(SelectiveMixer):
    """Mamba's layer with step b / (1 + b k'k), b = sigmoid(.), and decay 1 - step k_n^2 instead of a learned one."""

    name = "longhorn"

    def steps(self, raw: Tensor, write: Tensor) -> tuple[Tensor, None]:
        b = torch.sigmoid(raw)
        return b / (1 + b * write.square().sum(-1, keepdim=True)), None
