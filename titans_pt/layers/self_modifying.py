"""Self-modifying memory of Hope (Nested Learning, arXiv 2512.24695, Section 8): memories write each other's lessons."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import MemoryConfig
from titans_pt.kernels.memory import MemoryState, self_modifying_memory
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.gradients import with_gradients
from titans_pt.layers.memory import MemoryNetwork, Projection, network_shape
from titans_pt.layers.memory_costs import kept_bytes, read_flops, stale_flops
from titans_pt.layers.memory_gates import Gates
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import precise
from titans_pt.layers.sharding import Shard

MEMORIES = ("k", "v", "eta", "alpha", "memory")
"""Memories of a head: for keys, values, step sizes and forgetting, and the main one, whose answers are the outputs."""
SPREAD = 0.2
"""Standard deviation, at initialisation, of the number from which a gate is computed."""


class Readout(nn.Module):
    """Learned maps from answers of the memories of step sizes and forgetting to gates, one per head.

    Calling the module returns copies of its parameters, for ZeRO-3: see MemoryNetwork.
    """

    sharding = {"": Shard.COLUMN}
    no_decay = ("step_bias", "keep_bias")

    def __init__(self, n_heads: int, width: int, steps: int, keeps: int):
        super().__init__()
        std = SPREAD * width**-0.5
        self.step = nn.Parameter(torch.empty(n_heads, width, steps).normal_(std=std))
        self.keep = nn.Parameter(torch.empty(n_heads, width, keeps).normal_(std=std))
        self.step_bias = nn.Parameter(torch.zeros(n_heads, 1, steps))
        self.keep_bias = nn.Parameter(torch.zeros(n_heads, 1, keeps))

    def forward(self) -> tuple[Tensor, ...]:
        """Weights (H, D, n) and biases (H, 1, n): of the steps, of the forgetting; fp32 (fp64).

        Every chunk reads them: bf16 copies would sum their gradients over chunks in bf16.
        """
        return tuple(precise(p, copy=True) for p in (self.step, self.step_bias, self.keep, self.keep_bias))


class AnswerGates(Gates):
    """Answers of two memories -> the gates of all five.

    theta, eta and the rule's own gates come from the memory of step sizes, alpha from the memory of forgetting. A
    learned map per head turns an answer into the gates' raw numbers. The paper has eta_t = M_eta(x_t), and leaves open
    how an answer of the head's width becomes a number, and in which range. Ranges here are those of :class:`Gates`.
    """

    def __init__(self, n_heads: int, width: int, config: MemoryConfig):
        super().__init__(config)
        self.readout = Readout(n_heads, width, 2 * self.layers + len(self.rule.gates), self.layers)

    def own_initialisation(self):
        """Starts the gates near their configured values."""
        step, momentum, keep = self.starts
        with torch.no_grad():
            self.readout.step_bias.copy_(torch.tensor([step, momentum] * self.layers + self.own_starts))
            self.readout.keep_bias.fill_(keep)
            if self.config.gates == "hard":  # see MemoryGates.own_initialisation
                self.readout.keep.zero_()

    def forward(self, steps: Tensor, keeps: Tensor, v: Tensor, learned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """
        Args:
            steps, keeps: (B, H, c, D), answers of the two memories.
            v: (B, H, M, c, D), values that each of M memories will write.
            learned: output of :class:`Readout`.

        Returns:
            theta, eta, alpha, own gates, (B, H, 1 or M, c, 1 or L) each.
        """
        step, step_bias, keep, keep_bias = (p.to(steps.dtype) for p in learned)
        numbers = (steps @ step + step_bias).unsqueeze(2)
        gates, own = numbers[..., : 2 * self.layers].unflatten(-1, (self.layers, 2)), numbers[..., 2 * self.layers :]
        raw = torch.cat([gates, (keeps @ keep + keep_bias).unsqueeze(2).unsqueeze(-1)], -1)
        theta, eta, alpha, *opened = self.opened(raw, None, own.unbind(-1), v)
        return theta, eta, alpha, *(gate.unsqueeze(-1) for gate in opened)

    def flops(self) -> Flops:
        """Per token."""
        heads, width, steps = self.readout.step.shape
        return heads * product(width, steps + self.readout.keep.shape[-1])


@dataclass
class SelfModifyingState:
    """memory: state of all memories (see MemoryState); head h has 5 h .. 5 h + 4, in the order of MEMORIES. x, q:
    (B, conv_width - 1, d_model), the convolutions' last inputs."""

    memory: MemoryState
    x: Tensor
    q: Tensor


class SelfModifyingMemory(nn.Module):
    """(B, T, d_model) -> answers of the main memories, (B, T, d_model), heads side by side, each normalised (RMS).

    M' are the memories at the start of a chunk, which all tokens of the chunk read:

        k = unit(M'_k(x))    v = unit(M'_v(x))    theta, eta from M'_eta(x)    alpha from M'_alpha(x)    y = M'(q)
        each of the five memories m learns M_m(k) = M'_m(v) by the memory rule, with these gates

    Only the projections x and q do not change while reading: linear, convolution, SiLU, unit length. x feeds the head's
    memories; without its linear layer a head would see only its own channels of the model.
    """

    sharding = {"": Shard.ENTER, "output_norm": Shard.SUMMED}
    main = slice(len(MEMORIES) - 1, None, len(MEMORIES))
    """Slice of the main memories among all memories."""

    def __init__(self, d_model: int, n_heads: int, conv_width: int, config: MemoryConfig, norm_eps: float):
        super().__init__()
        self.config = config
        self.x = Projection(d_model, n_heads, conv_width, unit=True)
        self.q = Projection(d_model, n_heads, conv_width, unit=True)
        self.shape = network_shape(d_model // n_heads, config)
        self.gates = AnswerGates(n_heads, self.shape.width, config)
        self.network = MemoryNetwork(len(MEMORIES) * n_heads, self.shape, config)
        self.output_norm = RMSNorm(self.shape.width, eps=norm_eps)

    def forward(
        self, x: Tensor, state: SelfModifyingState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, SelfModifyingState]:
        q, q_state = self.q(x, state and state.q, documents)
        x, x_state = self.x(x, state and state.x, documents)
        weights, norm = self.network()
        learned = self.gates.readout()
        y, after = self_modifying_memory(
            self.queries(x, q),
            partial(self.written, learned),
            weights,
            network=self.shape,
            norm=norm,
            rule=self.gates.rule,
            chunk_size=self.config.chunk_size,
            forget_to=self.config.forget_to,
            initial_state=state.memory if state else None,
            output_final_state=True,
            reset=documents.host if documents else None,
            save_every=self.config.save_every,
        )
        assert after is not None
        y = with_gradients(y, x, *learned)  # a call inside one chunk reads nothing that it writes
        y = self.output_norm(y[:, :, self.main].to(self.output_norm.weight.dtype))
        return y.flatten(-2), SelfModifyingState(after, x_state, q_state)

    @staticmethod
    def queries(x: Tensor, q: Tensor) -> Tensor:
        """Queries of all memories, (B, T, 5 H, D): q of the main ones, x of all others, both (B, T, H, D)."""
        return torch.stack([x] * (len(MEMORIES) - 1) + [q], 3).flatten(2, 3)

    def written(
        self, learned: tuple[Tensor, ...], answers: Tensor, read: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """The author (titans_pt.kernels.memory.call.Author) of keys, values and gates of all memories.

        learned: output of :class:`Readout`. answers: (B, 5 H, c, D).
        """
        answers = answers.unflatten(1, (-1, len(MEMORIES)))

        def of_all(x: Tensor) -> Tensor:
            """(B, H, 1 or 5, c, .) -> (B, 5 H, c, .)."""
            return x.expand(-1, -1, len(MEMORIES), -1, -1).flatten(1, 2)

        k, v, steps, keeps, _ = answers.unbind(2)
        k, v = (of_all(F.normalize(x, dim=-1, eps=1e-6).unsqueeze(2)) for x in (k, v))
        v = read(v)
        gates = self.gates(steps, keeps, v.unflatten(1, (-1, len(MEMORIES))), learned)
        if all(gate.shape[2] == 1 for gate in gates):  # shared by a head's memories, whose coefficients are made once
            return k, v, *(gate.squeeze(2) for gate in gates)
        return k, v, *map(of_all, gates)

    # ---- costs, for the plan and the FLOP count

    @property
    def _memories(self) -> int:
        return len(MEMORIES) * self.x.n_heads

    def flops(self, length: int) -> Flops:
        """Per token of a document of any length: two projections, gates, and for each memory the cost of a memory with
        stale reads and of one further read, of its own value."""
        width = self.x.linear.in_features
        each = stale_flops(self.shape, self.config) + read_flops(self.shape)
        return 2 * product(width, width) + self.gates.flops() + self._memories * each

    def kept_state_bytes(self, length: int) -> int:
        """Bytes kept for the backward pass of a row of ``length`` tokens: fp32 states at every save_every-th block."""
        return kept_bytes(self.shape, self.config, self._memories, length)

    @property
    def piece(self) -> int:
        return 1

    def unserved(self, dtype: torch.dtype) -> str | None:
        """Reason why the fused kernels would not serve it on a GPU."""
        return "keys, values and gates of a chunk are answers of the memories at its start"

    def scratch_bytes(self) -> int:
        return 0
