"""The forecaster: windows of a series, patches, backbone, a linear head. Channels are rows of the batch."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from titans_pt.config import ModelConfig
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard
from titans_pt.models.backbone import Backbone, initialise

EPS = 1e-5
"""Added to a window's variance, as iTransformer does."""
BIAS = 0.02
"""Standard deviation of the patches' bias at initialisation."""


def patches_of(lookback: int, patch: int, stride: int) -> int:
    """Number of patches of a lookback whose end is repeated by one stride."""
    return (lookback - patch) // stride + 2


class Forecaster(nn.Module):
    """Lookbacks of each channel -> the ``horizon`` steps after each.

    A lookback is normalised by its mean and standard deviation; the forecast is scaled back. The lookback is cut into
    patches (its end repeated by one stride, as in PatchTST); the output of its last patch is the forecast. Lookbacks
    that follow each other are one sequence: the mixers' state after one is the state before the next.

    Args:
        channels: number of channels of the series, only for the count of FLOPs.
    """

    sharding = {"norm": Shard.BETWEEN}

    def __init__(self, config: ModelConfig, lookback: int, horizon: int, patch: int, stride: int, channels: int = 1):
        super().__init__()
        self.lookback, self.horizon, self.patch, self.stride, self.channels = lookback, horizon, patch, stride, channels
        self.enter = nn.Linear(patch, config.d_model)
        self.blocks = Backbone(config)
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.leave = nn.Linear(config.d_model, horizon)
        initialise(self, config)
        # A constant lookback is 0 after normalisation. At tokens that are exactly 0, norms and unit lengths have
        # derivatives of 1,000 and more, in every layer.
        nn.init.normal_(self.enter.bias, std=BIAS)

    @property
    def patches(self) -> int:
        """Number of patches of a lookback."""
        return patches_of(self.lookback, self.patch, self.stride)

    def forward(
        self, x: Tensor, state: list[Any] | None = None, output_final_state: bool = True
    ) -> tuple[Tensor, list[Any] | None]:
        """
        Args:
            x: (B, C, N * lookback), N lookbacks that follow each other.
            state: the state that the call for the lookbacks before returned; None at the start.

        Returns:
            (B, C, N, horizon) fp32, and the state after the last lookback.
        """
        x = x.float().unflatten(-1, (-1, self.lookback))
        mean = x.mean(-1, keepdim=True)
        deviation = (x.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()
        x = F.pad((x - mean) / deviation, (0, self.stride, 0, 0), mode="replicate")
        patches = x.unfold(-1, self.patch, self.stride)  # (B, C, N, patches, patch)
        tokens = self.enter(patches.flatten(2, 3).flatten(0, 1).to(self.enter.weight.dtype))
        y, state = self.blocks(tokens, state, None, output_final_state)
        y = y.unflatten(1, (-1, self.patches))[:, :, -1]
        y = self.leave(self.norm(y)).float().unflatten(0, patches.shape[:2])
        return y * deviation + mean, state

    def flops(self, length: int) -> Flops:
        """Per time step of the series, all channels."""
        lookbacks, width = length // self.lookback, self.enter.out_features
        tokens = lookbacks * self.patches
        blocks = (self.blocks.flops(tokens) + product(self.patch, width)) * tokens
        return (blocks + product(width, self.horizon) * lookbacks) * (self.channels / length)
