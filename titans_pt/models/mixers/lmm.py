"""LMM: the long-term memory alone as the sequence mixer."""

from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import (
    ACTIVATIONS,
    AnyMemoryState,
    MemoryMixer,
    OutputGateSettings,
    build_memory,
    persistent,
    remember,
)


@MIXERS.register
class LMM(MemoryMixer):
    """out(memory([persistent | x]) * sigmoid(gate(x))); the sigmoid is ``output_gate``.

    Not silu: for inputs of zero mean its output is mostly noise (mean 0.2, deviation 0.6), which then multiplies the
    memory's output. Recall stays at a third of the answers that it reaches with a sigmoid (docs/notebook.md).
    """

    name = "lmm"
    Settings = OutputGateSettings
    sharding = {"persistent": Shard.WHOLE, "gate": Shard.ENTER_COLUMN, "out": Shard.LAST_ROW}

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.output_gate = self.settings(config).output_gate
        self.persistent = persistent(config)
        self.memory = build_memory(config)
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: AnyMemoryState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, AnyMemoryState]:
        y, after = remember(self.memory, x, self.persistent, state, documents)
        return self.out(y * ACTIVATIONS[self.output_gate](self.gate(x))), after

    def flops(self, length: int) -> Flops:
        d = self.out.in_features
        return self.memory.flops(length) + 2 * product(d, d)
