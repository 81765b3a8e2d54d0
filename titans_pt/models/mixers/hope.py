"""Hope: a memory that makes its own keys, values and gates (Nested Learning, arXiv 2512.24695, Section 8)."""

from typing import Any

from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.self_modifying import SelfModifyingMemory, SelfModifyingState
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import ACTIVATIONS, MemoryMixer, OutputGateSettings


@MIXERS.register
class Hope(MemoryMixer):
    """out(memory(x) * sigmoid(gate(x))): LMM with a :class:`SelfModifyingMemory` as its memory. The sigmoid is
    ``output_gate``. As in the paper, there are no persistent tokens.

    A model with this mixer has the paper's rule, delta gradient descent without momentum, as the default of
    model.memory.rule and .momentum; the default of .theta_init is 0.05. The paper's MLPs, the continuum memory system,
    are model.mlp_periods.
    """

    name = "hope"
    Settings = OutputGateSettings
    stale = True
    shared = ("n_heads", "conv_width", "norm_eps", "init_std", "n_layers")
    sharding = {"gate": Shard.ENTER_COLUMN, "out": Shard.LAST_ROW}

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.output_gate = self.settings(config).output_gate
        self.memory = SelfModifyingMemory(  # type: ignore[assignment]  # of all mixers this one alone has another memory
            config.d_model, config.memory_heads, config.conv_width, config.memory, config.norm_eps
        )
        self.gate = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        # A step changes the keys, values and gates of all later steps: at the usual step size, gradients explode.
        own = {"model.memory.rule": "dgd", "model.memory.momentum": False, "model.memory.theta_init": 0.05}
        return super().defaults(config, length) | own

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        memory, with_it = config.model.memory, f"with the mixer {cls.name}"
        need(memory.hierarchy is None, "model.memory.hierarchy", "set", f"must be null {with_it}: lmm, mag, mal")
        need(memory.caching is None, "model.memory.caching", "set", f"must be null {with_it}: lmm, mac, mag, mal, mab")
        need(
            memory.write_cost == 0,
            "model.memory.write_cost",
            memory.write_cost,
            f"must be 0 {with_it}, whose gates the backward pass makes again",
        )
        need(memory.alpha == "head", "model.memory.alpha", memory.alpha, f"must be head {with_it}")

    def forward(
        self, x: Tensor, state: SelfModifyingState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, SelfModifyingState]:
        y, after = self.memory(x, state, documents)
        return self.out(y * ACTIVATIONS[self.output_gate](self.gate(x))), after

    def flops(self, length: int) -> Flops:
        d = self.out.in_features
        return self.memory.flops(length) + 2 * product(d, d)
