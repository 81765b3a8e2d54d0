"""Common block of TTT-Linear and TTT-MLP: the authors' "Mamba backbone" (arXiv 2407.04620, Section 2.7)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import varying
from titans_pt.layers.sharding import Shard
from titans_pt.layers.ttt import TestTimeTraining, TestTimeTrainingState
from titans_pt.models.mixers.recurrent import HeadWidths


class TTTSettings(Section):
    head_width: Annotated[int, Field(gt=0, multiple_of=2)] = 64
    """Width of a head, and of its inner network's inputs and outputs; model.d_model / head_width heads. The default is
    lowered until it divides model.d_model."""
    mini_batch: Positive = 16
    """Tokens whose gradients are taken at the same weights."""
    base_lr: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest learning rate of the inner loop, before it is divided by head_width."""
    base_lr_warmup: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of train.max_steps over which base_lr rises to its value, linearly, from a tenth of it."""


@dataclass
class TTTMixerState:
    """branch: the newest conv_width - 1 inputs of the convolution before the layer, (B, conv_width - 1, d_model)."""

    branch: Tensor
    ttt: TestTimeTrainingState


class TTTMixer(HeadWidths):
    """b = conv(RMSNorm(x)); b + ttt(RMSNorm(x + b)): x, the residual stream itself, first gets a branch of its own."""

    expansion: ClassVar[int | None] = None
    """Width of the inner network's hidden layer over its input; None: no hidden layer."""

    Settings = TTTSettings
    shared = ("conv_width", "rope_base", "norm_eps", "init_std", "n_layers")
    normalises = True
    write_gate = "ttt.rate"
    sharding = {
        "": Shard.CLOSE,  # the tensors that it adds to its output are whole in time
        "branch_norm": Shard.WHOLE,
        "branch": Shard.WHOLE,
        "norm": Shard.WHOLE,
    }
    ends = ()

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, settings = config.d_model, self.settings(config)
        self.warmup = settings.base_lr_warmup
        self.branch_norm = RMSNorm(d, eps=config.norm_eps)
        self.branch = ShortConvolution(d, config.conv_width, bias=True)
        self.norm = RMSNorm(d, eps=config.norm_eps)
        self.ttt = TestTimeTraining(
            d, settings.head_width, settings.mini_batch, settings.base_lr, self.expansion, config.conv_width,
            config.rope_base,
        )  # fmt: skip

    def set_progress(self, done: float):
        self.ttt.risen = varying(0.1 + 0.9 * min(1.0, done / self.warmup) if self.warmup else 1.0)

    def forward(
        self, x: Tensor, state: TTTMixerState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, TTTMixerState]:
        b, branch = self.branch(self.branch_norm(x), state and state.branch, documents)
        y, ttt = self.ttt(self.norm(x + b), state and state.ttt, documents)
        return b + y, TTTMixerState(branch, ttt)

    def flops(self, length: int) -> Flops:
        return self.ttt.flops()

    def unserved(self, dtype: torch.dtype) -> str:
        return "TTT's memory has no kernels of its own"

    def kept_state_bytes(self, length: int) -> int:
        return self.ttt.kept_state_bytes(length)

    @property
    def piece(self) -> int:
        return self.ttt.mini_batch
