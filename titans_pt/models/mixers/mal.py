"""MAL: the memory as a separate layer, then sliding-window attention on its output."""

from dataclasses import dataclass

from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.kernels.memory.state import Weights
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, product
from titans_pt.layers.hierarchy import Starts
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.common import (
    ACTIVATIONS,
    AnyMemoryState,
    OutputGateSettings,
    WindowedMemoryMixer,
    build_memory,
    persistent,
)


@dataclass
class MALState:
    memory: AnyMemoryState
    attention: AttentionState


class MALSettings(OutputGateSettings):
    residual: bool = True
    """Whether attention sees each token plus the memory's output, which is also added to attention's output. False:
    attention sees the memory's output alone, as printed in the paper."""


@MIXERS.register
class MAL(WindowedMemoryMixer):
    """m = memory_out(memory(x) * sigmoid(gate(x))); m + out(window_attention(norm(x + m))), over [persistent | x]; with
    residual=false out(window_attention(norm(m))). The sigmoid is ``output_gate``.

    The default is a sigmoid for the reason given in LMM. Both layers have residual connections ("residual connections
    throughout"): attention sees the token plus the memory's output m, and m is also added to attention's output.
    Through attention alone, which starts as a mean over the window, hardly any of m arrives, and recall is not learned
    (docs/notebook.md).
    """

    name = "mal"
    Settings = MALSettings
    sharding = {
        "": Shard.CLOSE,  # the tensors that it adds to its output are whole in time
        "persistent": Shard.WHOLE,
        "norm": Shard.WHOLE,
        "gate": Shard.ENTER_COLUMN,
        "memory_out": Shard.ROW,
        "out": Shard.ROW,
    }
    ends = ("memory_out", "out")

    def __init__(self, config: ModelConfig):
        super().__init__()
        settings = self.settings(config)
        self.output_gate, self.residual = settings.output_gate, settings.residual
        self.persistent = persistent(config)
        self.memory = build_memory(config)
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.memory_out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, config.window)
        self.out = nn.Linear(self.attention.width, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: MALState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MALState]:
        prefix: Tensor | None = None
        start: Weights | Starts | None = None
        if self.persistent is not None and (state is None or documents is not None):
            tokens = self.persistent[None]
            remembered, start = self.memory.start_after(tokens)
            prefix = self._seen(tokens, self._recalled(tokens, remembered))
        m, memory = self.memory(x, state and state.memory, documents, start=start)
        m = self._recalled(x, m)
        a, attention = self.attention(self._seen(x, m), state and state.attention, documents, prefix)
        a = self.out(a)
        return m + a if self.residual else a, MALState(memory, attention)

    def _seen(self, x: Tensor, m: Tensor) -> Tensor:
        """Input of attention for tokens x with the memory's output m."""
        return self.norm(x + m if self.residual else m)

    def _recalled(self, x: Tensor, m: Tensor) -> Tensor:
        return self.memory_out(m * ACTIVATIONS[self.output_gate](self.gate(x)))

    def flops(self, length: int) -> Flops:
        d, prefix = self.gate.in_features, 0 if self.persistent is None else len(self.persistent)
        attention = self.attention.flops(self.attention.seen(length) + prefix)
        return self.memory.flops(length) + attention + linear_flops(self.out) + 2 * product(d, d)
