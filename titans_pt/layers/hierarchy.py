"""TNT's memories: a global one with large chunks, and local ones that begin again at every shard."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import MemoryConfig
from titans_pt.kernels.linear_memory import linear_memory
from titans_pt.kernels.memory import MemoryState, unserved
from titans_pt.kernels.memory.state import Weights
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.memory import (
    MemoryNetwork,
    check_start,
    network_shape,
    prefix_chunk,
    projections,
    run_memory,
)
from titans_pt.layers.memory_costs import inner_flops, kept_bytes, stale_flops
from titans_pt.layers.memory_gates import MemoryGates, of_chunk
from titans_pt.layers.modules import Modules
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard, Sharding
from titans_pt.layers.state import ALIKE, check_kind, map_tensors

Starts = tuple[Weights, ...]
"""M_0 of each memory, the global one first: L tensors (H, d_in, d_out)."""


@dataclass
class HierarchyState:
    """memories: the global one, then the local ones. q, k, v: (B, conv_width - 1, H D), the convolutions' last
    inputs. place: (B,) int64, tokens read of each row's shard; on the host. keys: (B, H, D, D) fp32, the sum of k k^T
    over the shard, or None without a projection. start: M_0 of each memory, each tensor (B, H, d_in, d_out), after a
    prefix; else None.
    """

    memories: tuple[MemoryState, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    place: Tensor
    keys: Tensor | None
    start: Starts | None = field(default=None, metadata=ALIKE)


class InnerMemory(nn.Module):
    """One memory, with its own gates and network. ``chunk`` may change; the gates keep the first chunk's step bound."""

    sharding: Sharding = {}

    def __init__(self, d_model: int, n_heads: int, width: int, config: MemoryConfig, chunk: int):
        super().__init__()
        self.config = of_chunk(config, chunk)
        self.chunk = chunk
        self.shape = network_shape(width, config)
        self.gates = MemoryGates(d_model, n_heads, self.config, self.shape.channels)
        self.network = MemoryNetwork(n_heads, self.shape, config)


class HierarchicalMemory(nn.Module):
    """(B, T, d_model) -> V(q_t) + sum_i W^i_t(P_t q_t) of every token, (B, T, H D), heads side by side, normalised.

    head_width: D; None: d_model / n_heads.

    TNT (arXiv 2511.07343). Tokens read V, the global memory, with the weights of their chunk's start: no token waits
    for others of its chunk. The local memories W^i see nearby tokens. They begin again at a learned M_0 every ``shard``
    tokens, which lets shards be computed in parallel. P_t is the sum of k k^T over the shard up to t: it projects a
    query onto the keys that the local memory was taught. P_t q_t is scaled to unit length, as keys are (the paper does
    not say). All memories share queries, keys and values. The paper trains without momentum and forgetting.

    A prefix is written to each memory once. Documents, and the shards of local memories, begin at the resulting
    weights.
    """

    sharding = {"": Shard.ENTER, "output_norm": Shard.SUMMED}

    def __init__(
        self, d_model: int, n_heads: int, conv_width: int, config: MemoryConfig, norm_eps: float,
        head_width: int | None = None, affine: bool = False,
    ):  # fmt: skip
        super().__init__()
        assert config.hierarchy is not None
        self.config, self.hierarchy = config, config.hierarchy
        self.q, self.k, self.v = projections(d_model, n_heads, conv_width, head_width, affine)
        width = head_width or d_model // n_heads
        chunks = (self.hierarchy.chunk, *self.hierarchy.locals)
        self.memories: Modules[InnerMemory] = Modules(
            InnerMemory(d_model, n_heads, width, config, chunk) for chunk in chunks
        )
        self.output_norm = RMSNorm(width, eps=norm_eps)

    def forward(
        self,
        x: Tensor,
        state: HierarchyState | None = None,
        documents: Documents | None = None,
        start: Starts | None = None,
        prefix: bool = False,
    ) -> tuple[Tensor, HierarchyState]:
        """start: M_0 of the memories in place of the learned ones (:meth:`start_after`); a state remembers it. prefix:
        whether x is a prefix, at whose end every memory has finished its chunk."""
        check_kind(state, (HierarchyState,))
        if state:
            self._check(state)
        q, q_state = self.q(x, state and state.q, documents)
        k, k_state = self.k(x, state and state.k, documents)
        v, v_state = self.v(x, state and state.v, documents)
        if start is None and state and state.start:
            start = tuple(tuple(w[0] for w in weights) for weights in state.start)
        before = state.memories if state else [None] * len(self.memories)
        resets = (None, None) if documents is None else (documents.host, documents.most)
        chunks = [memory.chunk for memory in self.memories]
        if prefix:
            chunks = [prefix_chunk(memory.gates.rule, memory.chunk, x.shape[1]) for memory in self.memories]
        y, after = self._read(0, chunks[0], q, k, v, x, start, before[0], *resets)
        memories, place, keys = [after], torch.zeros(len(x), dtype=torch.int64), None
        if self.hierarchy.locals:
            y, memories, place, keys = self._locals(y, after, chunks, q, k, v, x, start, state, before, documents)
        kept = None
        if start is not None:
            kept = tuple(tuple(w.expand(len(x), *w.shape) for w in weights) for weights in start)
        state = HierarchyState(tuple(memories), q_state, k_state, v_state, place, keys, kept)
        return self.output_norm(y.to(self.output_norm.weight.dtype)).flatten(-2), state

    def _check(self, state: HierarchyState):
        """
        Raises:
            ValueError: ``state`` is of a hierarchy with other memories, chunks, shards or projection.
        """
        levels, chunks = self.hierarchy, [memory.chunk for memory in self.memories]
        projected = bool(levels.locals) and levels.projection
        fits = len(state.memories) == len(chunks) and (state.keys is not None) == projected
        on_host = all(memory.offset.device.type == "cpu" for memory in state.memories)
        if fits and levels.locals and on_host and not torch.compiler.is_compiling():
            # All offsets count from the shard's start; at its end (place 0) local memories have not begun again yet.
            place = state.place[state.place > 0]
            offsets = (memory.offset[state.place > 0] for memory in state.memories)
            fits = bool((state.place < levels.shard).all()) and all(
                torch.equal(offset, place % chunk) for offset, chunk in zip(offsets, chunks, strict=True)
            )
        if not fits:
            raise ValueError(f"state: given one of another hierarchy, of {len(state.memories)} memories; this one's "
                             f"chunks are {chunks}, with shard={levels.shard} and projection={projected}")  # fmt: skip

    def _locals(self, y, after, chunks, q, k, v, x, start, state, before, documents):
        """Adds the local memories' outputs to y; returns it with all memories' states, the place in the shard, and the
        keys' sum."""
        shard, length = self.hierarchy.shard, x.shape[1]
        place, reset = _places(state.place if state else None, len(x), length, shard, documents)
        most = 1 + length // shard + (documents.most if documents else 0)
        memories, keys, rows = [after], None, len(x) * length // shard
        if state is None and documents is None and length > shard and length % shard == 0:
            # Whole shards are independent: they become rows.
            q, k, v, x = (t.reshape(rows, shard, *t.shape[2:]) for t in (q, k, v, x))
            reset = None
        if self.hierarchy.projection:
            q, keys = linear_memory(q, k, k, initial_state=state and state.keys, output_final_state=True, reset=reset)
            q = F.normalize(q, dim=-1, eps=1e-6)
        total = y.new_zeros(())
        for n in range(1, len(self.memories)):
            out, memory = self._read(n, chunks[n], q, k, v, x, start, before[n], reset, most)
            total, memories = total + out, [*memories, memory]
        if len(x) != len(y):
            total, each = total.reshape(y.shape), len(x) // len(y)
            memories[1:] = [_last(memory, each) for memory in memories[1:]]
            keys = None if keys is None else keys[each - 1 :: each]
        return y + total, memories, place, keys

    def _read(self, n: int, chunk: int, q, k, v, x, start, before, reset, most) -> tuple[Tensor, MemoryState]:
        """Run memory n over q, k, v (B, T, H, D) in chunks of ``chunk``; no row of ``reset`` has more than ``most``
        starts."""
        memory = self.memories[n]
        weights, norm = memory.network()
        if start:
            check_start(start[n], weights)
        tokens = (q, k, v, *memory.gates(x, v))
        return run_memory(
            memory, tokens, start[n] if start else weights, norm, chunk, before, reset, most, stale=n == 0
        )

    def set_progress(self, done: float):
        """Set the local memories' chunk sizes for the share ``done`` of the training that is complete."""
        levels = self.hierarchy
        chunks = levels.locals
        if levels.final_locals is not None and done > 1 - levels.final_share:
            chunks = levels.final_locals
        for memory, chunk in zip(self.memories[1:], chunks, strict=True):
            memory.chunk = chunk

    def start_after(self, prefix: Tensor) -> tuple[Tensor, Starts]:
        """prefix (1, P, d_model) -> its outputs (1, P, H D) and each memory's weights after writing it."""
        y, state = self(prefix, prefix=True)
        return y, tuple(tuple(w[0] for w in memory.weights) for memory in state.memories)

    # ---- costs, for the plan and the FLOP count

    def flops(self, length: int) -> Flops:
        """Per token, at any length: the projections, and each memory's gates and products."""
        linear, heads, head = self.q.linear, self.q.n_heads, self.memories[0].shape.width
        total = sum((memory.gates.flops() for memory in self.memories), Flops(0, 0))
        total += 3 * product(linear.in_features, linear.out_features)
        total += heads * stale_flops(self.memories[0].shape, self.memories[0].config)
        for memory in self.memories[1:]:
            total += heads * inner_flops(memory.shape, memory.config)
        if self.hierarchy.locals and self.hierarchy.projection:
            total += heads * 2 * product(head, head)
        return total

    @property
    def piece(self) -> int:
        return 1

    def kept_state_bytes(self, length: int) -> int:
        """Bytes kept for the backward pass of a row of ``length`` tokens: the fp32 state before every global chunk, and
        the local memories' states."""
        heads, shard, one = self.q.n_heads, self.hierarchy.shard, self.memories[0]
        states = 12 * heads * sum(a * b for a, b in one.shape.layers) * -(-length // one.config.chunk_size)
        each = (kept_bytes(memory.shape, memory.config, heads, min(length, shard)) for memory in self.memories[1:])
        return states + sum(each) * -(-length // shard)

    def unserved(self, dtype: torch.dtype) -> str | None:
        """Reason why the fused kernels would not serve the local memories on a GPU; None if they would."""
        each = (
            unserved(dtype, memory.shape, memory.config.chunk_size, rule=memory.gates.rule)
            for memory in self.memories[1:]
        )
        return next((reason for reason in each if reason), None)

    def scratch_bytes(self) -> int:
        from titans_pt.kernels.memory.fused.operators import SCRATCH_BYTES

        return SCRATCH_BYTES if self.hierarchy.locals else 0


def _places(
    old: Tensor | None, batch: int, length: int, shard: int, documents: Documents | None
) -> tuple[Tensor, Tensor | None]:
    """Place in the shard (B,) after ``length`` tokens, and a mask of shard starts, bool (B, T), or None without any;
    both on the host.

    old: (B,), tokens read of each row's shard, on the host. None at a stream's start, where no memory needs a reset.
    """
    t = torch.arange(length)
    place = (torch.zeros(batch, dtype=torch.int64) if old is None else old)[:, None] + t
    if documents is not None:
        begin = torch.where(documents.host, t, -1).cummax(1).values
        place = torch.where(begin < 0, place, t - begin)
    starts = place % shard == 0
    if old is None:
        starts[:, 0] = False
    return (place[:, -1] + 1) % shard, starts if bool(starts.any()) else None


def _last(memory: MemoryState, each: int) -> MemoryState:
    """The last shard's state of every sequence; a sequence is ``each`` rows."""
    pick = slice(each - 1, None, each)
    return map_tensors(memory, lambda x: x[pick])
