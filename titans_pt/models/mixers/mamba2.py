"""Mamba2: a selective state space with one decay per token and head (Dao and Gu, arXiv 2405.21060)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Positive, Section
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, SelectiveDecay
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import PROJECTED
from titans_pt.models.mixers.recurrent import LinearMemoryMixer, convolve, fitting_width, linear


@MIXERS.register
class Mamba2(LinearMemoryMixer):
    """A linear memory with keys B, queries C, the same for all heads, and values s x: out(RMSNorm((y + D x) silu(z))).

    x, B and C pass a convolution with bias and SiLU; the norm is over all heads.
    """

    name = "mamba2"
    shared = PROJECTED
    decay = "token"

    class Settings(Section):
        state: Positive = 128
        """Width N of B and C: entries of the state per channel."""
        expansion: Positive = 2
        """Channels over model.d_model."""
        head_width: Positive = 64
        """Channels of a head. The default is lowered until it divides the channels."""

    sharding = {
        "": Shard.ENTER,
        "x": Shard.COLUMN,
        "z": Shard.COLUMN,
        "B": Shard.SUMMED,
        "C": Shard.SUMMED,
        "x_conv": Shard.COLUMN,
        "B_conv": Shard.SUMMED,
        "C_conv": Shard.SUMMED,
        "step": Shard.COLUMN,
        "D": Shard.COLUMN,
        "norm": Shard.NORM_OF_ALL_HEADS,
        "out": Shard.LAST_ROW,
    }
    no_decay = ("D",)

    def __init__(self, config: ModelConfig):
        d, settings = config.d_model, self.settings(config)
        super().__init__(config, settings.state, settings.head_width)
        channels = settings.expansion * d
        self.x, self.z = linear(d, channels), linear(d, channels)
        self.B, self.C = linear(d, settings.state), linear(d, settings.state)
        self.x_conv = ShortConvolution(channels, config.conv_width, bias=True, of_values=True)
        self.B_conv, self.C_conv = (ShortConvolution(settings.state, config.conv_width, bias=True) for _ in "BC")
        self.step = linear(d, self.n_heads)
        self.decays = SelectiveDecay(self.n_heads, lowest=1)
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = RMSNorm(channels, eps=config.norm_eps)
        self.out = linear(channels, d)

    @classmethod
    def heads(cls, config: ModelConfig) -> tuple[str, int]:
        own = cls.settings(config)
        name = f"model.{cls.name}"
        return f"model.d_model * {name}.expansion / {name}.head_width", own.expansion * config.d_model // own.head_width

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        return fitting_width(cls, cls.Settings.model_validate(cls._given(config)).expansion * config.d_model)

    @classmethod
    def check(cls, config: Config, need: Need):
        own = cls.settings(config.model)
        channels = own.expansion * config.model.d_model
        need(
            channels % own.head_width == 0,
            f"model.{cls.name}.head_width",
            own.head_width,
            f"must divide model.d_model * model.{cls.name}.expansion = {channels}",
        )

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        convolutions = self.x_conv, self.B_conv, self.C_conv
        (v, k, q), inputs = convolve((self.x(x), self.B(x), self.C(x)), convolutions, state, documents)
        v = self.split(v)
        step, decay = self.decays(self.step(x))
        q, k = (y.unsqueeze(2).expand(-1, -1, self.n_heads, -1) for y in (q, k))
        y, memory = self.remember(q, k, (step.unsqueeze(-1) * v).to(x.dtype), decay, None, state, documents)
        y = (y + self.D.unsqueeze(-1) * v).flatten(-2)
        return self.out(self.norm(y * F.silu(self.z(x)))), RecurrentState(memory, inputs)
