"""Continuum memory system: MLPs before a block's MLP whose weights move while a sequence is read, each at its own pace.

Nested Learning (arXiv 2512.24695) has MLP_fk(... MLP_f1(x)): level l subtracts the sum of its steps every C_l tokens.
The last level here is the block's SwiGLU, which changes only in training. The paper takes the steps from the language
model's loss, which a forward pass does not have, and leaves open how gradients pass through them. Here a level learns
from its own input, as the memory does: keys and values are linear in that input, and its rule is ``model.memory.rule``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.kernels.memory import MemoryState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.memory import MemoryNetwork, network_shape, run_memory
from titans_pt.layers.memory_costs import stale_flops
from titans_pt.layers.memory_gates import MemoryGates, of_chunk
from titans_pt.layers.modules import Modules
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard


@dataclass
class ContinuumState:
    """mixer: the state of the block's mixer. levels: each level's state, see MemoryState."""

    mixer: Any
    levels: tuple[MemoryState, ...]


class LevelMemory(nn.Module):
    """(B, T, d_model) -> out(M(k)), (B, T, d_model): M is an MLP per head, with the weights of its period's start.

    The input gives one vector per head, which is both query and key: M(k) is an MLP's output for its input. A period's
    tokens change M together, at its end: no token waits for others of its period.
    """

    sharding = {"key": Shard.COLUMN, "value": Shard.COLUMN, "output_norm": Shard.SUMMED, "out": Shard.LAST_ROW}
    per_rank = ("n_heads",)
    ends = ("out",)

    def __init__(self, config: ModelConfig, period: int):
        super().__init__()
        d, self.n_heads = config.d_model, config.memory_heads
        self.config = of_chunk(config.memory.model_copy(update={"hierarchy": None}), period)
        self.shape = network_shape(d // self.n_heads, self.config)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.gates = MemoryGates(d, self.n_heads, self.config, self.shape.channels)
        self.network = MemoryNetwork(self.n_heads, self.shape, self.config)
        self.output_norm = RMSNorm(self.shape.width, eps=config.norm_eps)
        self.out = nn.Linear(d, d, bias=False)

    def forward(
        self, x: Tensor, state: MemoryState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MemoryState]:
        k, v = (linear(x).unflatten(-1, (self.n_heads, -1)) for linear in (self.key, self.value))
        k = torch.nn.functional.normalize(k, dim=-1, eps=1e-6)
        weights, norm = self.network()
        tokens = (k, k, v, *self.gates(x, v))
        reset, most = (documents.host, documents.most) if documents else (None, None)
        y, after = run_memory(self, tokens, weights, norm, self.config.chunk_size, state, reset, most, stale=True)
        return self.out(self.output_norm(y.to(self.output_norm.weight.dtype)).flatten(-2)), after

    def flops(self) -> Flops:
        """Per token."""
        d = self.out.in_features
        return 3 * product(d, d) + self.gates.flops() + self.n_heads * stale_flops(self.shape, self.config)


class Level(nn.Module):
    """x + memory(norm(x))."""

    sharding = {"norm": Shard.BETWEEN, "memory": Shard.ENTER_OPEN}

    def __init__(self, config: ModelConfig, period: int):
        super().__init__()
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.memory = LevelMemory(config, period)

    def forward(
        self, x: Tensor, state: MemoryState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MemoryState]:
        y, state = self.memory(self.norm(x), state=state, documents=documents)
        return x + y, state


class ContinuumMemory(Modules[Level]):
    """The levels of ``model.mlp_periods``, one after the other: (B, T, d_model) -> (B, T, d_model)."""

    def __init__(self, config: ModelConfig):
        super().__init__(Level(config, period) for period in config.mlp_periods)

    def forward(
        self, x: Tensor, states: tuple[MemoryState, ...] | None, documents: Documents | None
    ) -> tuple[Tensor, tuple[MemoryState, ...]]:
        after = []
        for level, state in zip(self, states or [None] * len(self), strict=True):
            x, state = level(x, state, documents)
            after.append(state)
        return x, tuple(after)

    def flops(self) -> Flops:
        """Per token."""
        return sum((level.memory.flops() for level in self), Flops(0, 0))
