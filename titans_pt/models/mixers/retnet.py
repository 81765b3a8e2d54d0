"""RetNet: linear attention with rotated keys and one fixed decay per head (Sun et al., arXiv 2307.08621)."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from titans_pt.config import ModelConfig, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState
from titans_pt.layers.rotary import rotate, rotation_from
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.recurrent import HeadWidthMixer, linear

EXPANSION = 2
"""Width of values over width of keys."""


class HeadDecays(nn.Module):
    """Log decays log(1 - 2^(-5-h)) of all heads h, (H,). It is a module: a tensor rank keeps only its own heads'."""

    sharding = {"": Shard.SPLIT}

    def __init__(self, n_heads: int):
        super().__init__()
        self.n_heads = n_heads

    def forward(self, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.log1p(-(2.0 ** (-5.0 - torch.arange(self.n_heads, device=like.device, dtype=dtype))))


@MIXERS.register
class RetNet(HeadWidthMixer):
    """out(RMSNorm per head * silu(gate(x))); q scaled by K^-1/2, q and k rotated by their positions."""

    name = "retnet"
    shared = ("rope_base", "norm_eps", "init_std", "n_layers")
    decay = "head"

    class Settings(Section):
        head_width: Annotated[int, Field(gt=0, multiple_of=2)] = 128
        """Width of a head's queries and keys, for model.d_model / head_width heads; values are twice as wide. The paper
        has 256, which leaves half as many heads to share out over tensor ranks. The default is lowered until it divides
        model.d_model."""

    sharding = {
        "": Shard.ENTER,
        "q": Shard.COLUMN,
        "k": Shard.COLUMN,
        "v": Shard.COLUMN,
        "gate": Shard.COLUMN,
        "norm": Shard.SUMMED,
        "out": Shard.LAST_ROW,
    }

    def __init__(self, config: ModelConfig):
        d, width = config.d_model, self.settings(config).head_width
        super().__init__(config, width, EXPANSION * width)
        self.rope_base = config.rope_base
        self.q, self.k = linear(d, d), linear(d, d)
        self.v, self.gate = linear(d, EXPANSION * d), linear(d, EXPANSION * d)
        self.decays = HeadDecays(self.n_heads)
        self.norm = RMSNorm(self.value_width, eps=config.norm_eps)
        self.out = linear(EXPANSION * d, d)

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        first, behind = (state.position, state.behind) if state else (0, None)
        q, k = self.split(self.q(x)), self.split(self.k(x))
        turn = rotation_from(first, q, self.rope_base, behind=behind)
        q, k = rotate(q, *turn), rotate(k, *turn)
        q, v = q * self.key_width**-0.5, self.split(self.v(x))
        y, memory = self.remember(q, k, v, self.decays(x), None, state, documents)
        y = self.norm(y) * F.silu(self.split(self.gate(x)))
        return self.out(y.flatten(-2)), RecurrentState(memory, (), first + x.shape[1], behind)
