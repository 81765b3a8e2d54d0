"""Common base of Mamba and Longhorn: the whole layer but the steps and decays of a channel's state."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.kernels.channel_scan import channel_scan, unserved
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, product
from titans_pt.layers.recurrence import RecurrentState, precise
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import Mixer
from titans_pt.models.mixers.recurrent import convolve, linear


class ScanInputs(nn.Module):
    """(B, T, rank + 2 N), whole on every tensor rank -> steps before their activation (B, T, channels), and the vectors
    that write and read the N entries of a state, (B, T, N) each."""

    sharding = {"": Shard.ENTER, "step": Shard.COLUMN}

    def __init__(self, rank: int, states: int, channels: int):
        super().__init__()
        self.sizes = (rank, states, states)
        self.step = linear(rank, channels, bias=True)

    def own_initialisation(self):
        bound = self.step.in_features**-0.5
        nn.init.uniform_(self.step.weight, -bound, bound)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step, write, read = x.split(self.sizes, -1)
        return self.step(step), write, read


class SelectiveMixer(Mixer):
    """x = silu(conv(W x)); out((scan(x) + D x) * silu(z)): steps, inputs and outputs of the scan depend on x."""

    class Settings(Section):
        state: Positive = 16
        """Entries N of a channel's state. A GPU's kernels have 4, 8, 16, 32, 64 and 128."""
        expansion: Positive = 2
        """Channels over model.d_model."""
        rank: Positive | None = None
        """Width between the two matrices that make the steps. Null: model.d_model / 16, rounded up."""

    shared = ("conv_width", "value_filters", "init_std", "n_layers")
    sharding = {
        "": Shard.ENTER,
        "x": Shard.COLUMN,
        "z": Shard.COLUMN,
        "conv": Shard.COLUMN,
        "low": Shard.ROW,
        "D": Shard.COLUMN,
        "out": Shard.LAST_ROW,
    }
    no_decay: ClassVar[tuple[str, ...]] = ("D",)

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, settings = config.d_model, self.settings(config)
        channels, rank, self.states = settings.expansion * d, settings.rank or -(-d // 16), settings.state
        self.x, self.z = linear(d, channels), linear(d, channels)
        self.conv = ShortConvolution(channels, config.conv_width, bias=True, of_values=True)
        self.low = linear(channels, rank + 2 * self.states)
        self.inputs = ScanInputs(rank, self.states, channels)
        self.D = nn.Parameter(torch.ones(channels))
        self.out = linear(channels, d)

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        return {f"model.d_model * model.{cls.name}.expansion": config.d_model * cls.settings(config).expansion}

    def steps(self, raw: Tensor, write: Tensor) -> tuple[Tensor, Tensor | None]:
        """Makes ``step`` and ``rate`` for channel_scan."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        (y,), inputs = convolve((self.x(x),), (self.conv,), state, documents)
        raw, write, read = self.inputs(self.low(y))
        step, rate = self.steps(precise(raw), precise(write))
        read_out, memory = channel_scan(
            y, step, write, read, rate, initial_state=state.memory if state else None, output_final_state=True,
            reset=None if documents is None else documents.starts,
        )  # fmt: skip
        assert memory is not None, "it was asked for"
        return self.out((read_out + self.D * y) * F.silu(self.z(x))), RecurrentState(memory, inputs)

    def flops(self, length: int) -> Flops:
        """Its linear layers, and the writes and reads of the states."""
        return linear_flops(self) + 2 * product(self.out.in_features, self.states)

    def unserved(self, dtype):
        return unserved(dtype, self.states)

    def needs(self) -> dict[str, str]:
        return {"triton": "install it: pip install triton"}
