"""The neural long-term memory as a layer: projections and the learned M_0 around kernels.memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.config import MemoryConfig
from titans_pt.kernels.memory import MemoryState, NetworkShape, memory_read, neural_memory, unserved
from titans_pt.kernels.memory.rules import Rule
from titans_pt.kernels.memory.soup import Soup
from titans_pt.layers.caching import Caches, Caching
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.gradients import with_gradients
from titans_pt.layers.memory_costs import inner_flops, kept_bytes, product_flops
from titans_pt.layers.memory_gates import MemoryGates, takes_small_steps
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import precise
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import ALIKE, check_kind


def prefix_chunk(rule: Rule, chunk: int, tokens: int) -> int:
    """Chunk size with which a memory whose usual chunk size is ``chunk`` reads a prefix of ``tokens`` tokens.

    A nonlinear rule writes at the end of a chunk, and the last chunk must not stay unfinished. The chunk size is then
    the largest up to ``chunk`` that divides the prefix.
    """
    if not rule.nonlinear:
        return chunk
    return next(size for size in range(min(chunk, tokens), 0, -1) if tokens % size == 0)


def default_init_std(config: MemoryConfig, shape: NetworkShape, d_in: int) -> float:
    """Initial standard deviation of a weight matrix of M_0 with ``d_in`` inputs.

    Under a LayerNorm a step moves the output by theta / std^2. Smaller weights make up for the smaller steps of deep
    memories, which then recall as much of a chunk as memories of two matrices.
    """
    if not shape.norm:
        return d_in**-0.5
    return (8 / shape.hidden) ** 0.5 if takes_small_steps(config) else 0.5


def network_shape(width: int, config: MemoryConfig) -> NetworkShape:
    """Shape of the memory's network in heads of this width."""
    rule = Rule.of(config)
    inputs, made = rule.width(width), rule.features(torch.zeros(1, width)).shape[-1]
    if made != inputs:
        raise TypeError(f"{type(rule).__name__}: its features of a head of {width} have a width of {made}, but width "
                        f"says {inputs}")  # fmt: skip
    return NetworkShape(
        width, config.expansion * width, config.depth, config.norm, config.residual, config.activation,
        None if inputs == width else inputs,
    )  # fmt: skip


class Projection(nn.Module):
    """Linear, causal convolution, SiLU, and for queries and keys unit length: (B, T, d_model) -> (B, T, H, D).

    head_width: D; None: d_model / n_heads.
    affine: the linear layer has a bias, and there is no SiLU.

    The filters of values (``unit`` is False) begin as the identity: at first a value depends on its own token alone.
    Random filters would mix it with the tokens before. All pairs of a chunk are written with the gradient at its start,
    and mixed values would add up to a sum in which none can be told from its neighbours. Recall is then learned late or
    never (docs/notebook.md, "The bag of values").
    """

    sharding = {"linear": Shard.COLUMN, "conv": Shard.COLUMN}
    per_rank = ("n_heads",)

    def __init__(
        self, d_model: int, n_heads: int, conv_width: int, unit: bool, head_width: int | None = None,
        affine: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.n_heads, self.unit, self.affine = n_heads, unit, affine
        width = n_heads * head_width if head_width else d_model
        self.linear = nn.Linear(d_model, width, bias=affine)
        self.conv = ShortConvolution(width, conv_width, of_values=not unit)
        if not unit:
            self.conv.begin_as_identity()

    def forward(
        self, x: Tensor, state: Tensor | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        width = y.shape[-1] // self.n_heads
        y, state = self.conv(y, state, documents, silu=not self.affine, unit=width if self.unit else 0)
        return y.unflatten(-1, (self.n_heads, width)), state


def projections(
    d_model: int, n_heads: int, conv_width: int, head_width: int | None, affine: bool
) -> tuple[Projection, Projection, Projection]:
    """A memory's projections to queries, keys and values."""
    q, k, v = (Projection(d_model, n_heads, conv_width, unit, head_width, affine) for unit in (True, True, False))
    return q, k, v


class MemoryNetwork(nn.Module):
    """Learned parameters of the memory: M_0, the initial weights of its MLP, and the LayerNorm, which the inner loop
    does not change.

    Calling the module returns copies of its parameters, which are whole under ZeRO-3: it gathers parameters by module.
    They have no weight decay: under the LayerNorm a smaller M_0 makes every inner step larger.
    """

    sharding = {"": Shard.COLUMN}

    def __init__(self, n_heads: int, shape: NetworkShape, config: MemoryConfig):
        super().__init__()
        self.shape = shape
        for n, (a, b) in enumerate(shape.layers):
            std = config.init_std or default_init_std(config, shape, a)
            self.register_parameter(f"weight_{n}", nn.Parameter(torch.empty(n_heads, a, b).normal_(std=std)))
        if shape.norm:
            self.norm_weight = nn.Parameter(torch.ones(n_heads, shape.width))
            self.norm_bias = nn.Parameter(torch.zeros(n_heads, shape.width))
        self.no_decay = tuple(name for name, _ in self.named_parameters())

    def forward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        """``depth`` weights (H, d_in, d_out), and the LayerNorm's (weight, bias), each (H, D), or None; fp32 (fp64).

        A call may read them once per segment: bf16 copies would sum their gradients over segments in bf16.
        """
        weights, norm = self.learned()
        return tuple(precise(w, copy=True) for w in weights), norm and (precise(norm[0], True), precise(norm[1], True))

    def learned(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        """The parameters themselves."""
        weights = tuple(getattr(self, f"weight_{n}") for n in range(self.shape.depth))
        return weights, (self.norm_weight, self.norm_bias) if self.shape.norm else None


@dataclass
class NeuralMemoryState:
    """memory: see MemoryState. q, k, v: (B, conv_width - 1, H D), the convolutions' last inputs.

    start: M_0 of a memory that began after a prefix, not at the learned weights: L tensors (B, H, d_in, d_out), equal
    for every row, which share its storage. Kept by memories that forget to it or whose caches read it, otherwise None.
    caches: caches of a memory with caching, otherwise None.
    """

    memory: MemoryState
    q: Tensor
    k: Tensor
    v: Tensor
    start: tuple[Tensor, ...] | None = field(default=None, metadata=ALIKE)
    caches: Caches | None = None


def check_start(start: tuple[Tensor, ...], learned: tuple[Tensor, ...]):
    """Raise ValueError unless M_0 of a state has the shapes (H, d_in, d_out) of the learned one."""
    found, own = ([tuple(w.shape) for w in weights] for weights in (start, learned))
    if found != own:
        raise ValueError(f"state: given one of another memory: its weights are {found}, those of this one {own} "
                         "(n_heads, depth, expansion)")  # fmt: skip


def run_memory(
    part: Any, tokens: tuple[Tensor, ...], start: tuple[Tensor, ...], norm: tuple[Tensor, Tensor] | None,
    chunk_size: int, before: MemoryState | None, reset: Tensor | None, most: int | None, stale: bool = False,
    **more: Any,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """Run one memory over ``tokens``: queries, keys, values and gates. Return outputs (B, T, H, D), and the state after
    the last token.

    Args:
        part: module that has the memory's ``shape``, ``gates`` and ``config``.
        start, norm: M_0 and the LayerNorm, as :class:`MemoryNetwork` returns them.
        reset: (B, T) bool, True where a document starts; None: nowhere.
        most: upper bound on the starts in a row.
        stale, more: as for :func:`neural_memory`.
    """
    q, k, v, theta, eta, alpha, *own = tokens
    y, after = neural_memory(
        q, k, v, theta, eta, alpha, start, network=part.shape, norm=norm, rule=part.gates.rule, own=tuple(own),
        chunk_size=chunk_size, forget_to=part.config.forget_to, initial_state=before, output_final_state=True,
        reset=reset, max_resets=most, save_every=part.config.save_every, stale=stale, **more,
    )  # fmt: skip
    assert after is not None
    if stale or part.gates.rule.nonlinear:  # a call inside one chunk reads nothing that it writes
        y = with_gradients(y, *tokens[1:])
    return y, after


class NeuralMemory(nn.Module):
    """(B, T, d_model) -> M_t(q_t) of every token, (B, T, H D): heads side by side, an RMSNorm on each.

    head_width: D; None: d_model / n_heads.

    A prefix (persistent tokens) is the same for every row and document. It is written once, and every document begins
    from the resulting weights, with S_0 = 0.
    """

    sharding = {"": Shard.ENTER, "output_norm": Shard.SUMMED}
    backend = "auto"
    """Implementation of the memory, as :func:`neural_memory` names them; "naive" is the definition."""

    def __init__(
        self, d_model: int, n_heads: int, conv_width: int, config: MemoryConfig, norm_eps: float,
        head_width: int | None = None, affine: bool = False,
    ):  # fmt: skip
        super().__init__()
        width = head_width or d_model // n_heads
        if (head_width is None and d_model % n_heads) or (config.norm and width == 1):
            raise ValueError(
                f"n_heads: given {n_heads}; must divide d_model={d_model}, and under a LayerNorm, which makes a "
                "constant of a head of width 1, be below it"
            )
        self.config = config
        self.q, self.k, self.v = projections(d_model, n_heads, conv_width, head_width, affine)
        self.shape = network_shape(width, config)
        self.gates = MemoryGates(d_model, n_heads, config, self.shape.channels)
        self.network = MemoryNetwork(n_heads, self.shape, config)
        self.caching = None if config.caching is None else Caching(d_model, n_heads * width, n_heads, config.caching)
        self.output_norm = RMSNorm(width, eps=norm_eps)

    def forward(
        self,
        x: Tensor,
        state: NeuralMemoryState | None = None,
        documents: Documents | None = None,
        start: tuple[Tensor, ...] | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, NeuralMemoryState]:
        """Reads and writes x.

        Args:
            start: weights in place of the learned M_0 (:meth:`start_after`); the state keeps them with
                forget_to="start".
            chunk_size: chunk size of a call that reads a whole sequence, without caches. None: the configured size.
        """
        check_kind(state, (NeuralMemoryState,))
        if state is not None and (state.caches is None) != (self.caching is None):
            raise ValueError("state: given one of a memory with other caching; pass a state of this memory")
        q, q_state = self.q(x, state and state.q, documents)
        k, k_state = self.k(x, state and state.k, documents)
        v, v_state = self.v(x, state and state.v, documents)
        weights, norm = self.network()
        if start is None and state and state.start:
            start = tuple(w[0] for w in state.start)
            check_start(start, weights)
        tokens = (q, k, v, *self.gates(x, v))
        before, caches = (state.memory, state.caches) if state else (None, None)
        run = partial(self._along, start or weights, norm, chunk_size or self.config.chunk_size)
        if self.caching is None or chunk_size:
            y, memory = run(tokens, before, documents)
            caches = None
        else:
            given = self.caching, run, start or weights, norm, x, tokens, before, caches, documents
            if torch.compiler.is_compiling():  # it would compile every piece separately
                # Not at the top: importing torch's compiler takes seconds.
                from titans_pt.kernels.memory import uncompiled

                y, memory, caches = uncompiled.run(self._cached, *given)
            else:
                y, memory, caches = self._cached(*given)
        kept = None
        caching = self.caching and self.caching.config
        if start and (self.config.forget_to == "start" or caching and (caching.fresh or caching.shares == "change")):
            kept = tuple(w.expand(len(x), *w.shape) for w in start)
        return self._normalised(y).flatten(-2), NeuralMemoryState(memory, q_state, k_state, v_state, kept, caches)

    def _along(
        self, start: tuple[Tensor, ...], norm: tuple[Tensor, Tensor] | None, chunk_size: int,
        tokens: tuple[Tensor, ...], before: MemoryState | None, documents: Documents | None, soup: Soup | None = None,
    ) -> tuple[Tensor, MemoryState]:  # fmt: skip
        """Run the memory over ``tokens`` (q, k, v and gates): outputs (B, T, H, D), and the state after them."""
        reset, most = (documents.starts, documents.most) if documents else (None, None)
        return run_memory(
            self, tokens, start, norm, chunk_size, before, reset, most, backend=self.backend, soup=soup
        )  # fmt: skip

    def _cached(
        self, caching: Caching, run: Callable, start: tuple[Tensor, ...], norm: tuple[Tensor, Tensor] | None, x: Tensor,
        tokens: tuple[Tensor, ...], memory: MemoryState | None, caches: Caches | None, documents: Documents | None,
    ) -> tuple[Tensor, MemoryState, Caches]:  # fmt: skip
        """Run the memory segment by segment: answers of memory and caches together, the final state, the new caches."""
        caches = caches or caching.begin(tokens[1])
        u, found, outputs = caching.vectors(x), caching.cut(caches, x.shape[1], documents), []
        given = tokens if u is None else (*tokens, u)
        # One split: separate slices would each fill a tensor of the whole length in the backward pass.
        parts = zip(*(t.split([piece.end - piece.begin for piece in found], 1) for t in given), strict=True)
        for piece, part in zip(found, parts, strict=True):
            own, vectors = (part, None) if u is None else (part[:-1], part[-1])
            here = documents.cut(piece.begin, piece.end) if documents and any(piece.new_document) else None
            caches = caching.begun(caches, piece.new_document)
            if caching.config.fresh:
                memory, here = self._begun(memory, here, caches.place % caching.config.segment == 0, own[0])
            # Computed even without caches: parameters of learned shares then have zero gradients on every rank.
            shares = caching.shares(vectors, own[1], caches) if caching.reads else None
            soup = None
            if caching.config.soup and caches.weights and shares is not None:
                soup = Soup(caches.weights, shares)
            y, memory = run(own, memory, here, soup)
            cached = (self._answer(own[0], weights, norm) for weights in caches.weights)
            if shares is not None and soup is None:
                y = caching.weighted(y, cached, shares)
            elif shares is None and caching.reads and caches.weights:
                first = self._answer(own[0], self.first_weights(start, len(x), caches.weights[0][0].dtype), norm)
                y = caching.by_change(y, cached, first, caches)
            outputs.append(y)
            caches = caching.after(caches, piece, own[1], self._met(memory))
        assert memory is not None, "no token is in no piece"
        return torch.cat(outputs, 1), memory, caches

    @staticmethod
    def _begun(
        memory: MemoryState | None, documents: Documents | None, again: Tensor, q: Tensor
    ) -> tuple[MemoryState | None, Documents | None]:
        """State before a piece, and starts within it, if the memories of the rows ``again`` (B,) restart there."""
        if memory is None or bool(again.all()):
            return None, None
        if not bool(again.any()):
            return memory, documents
        starts = torch.zeros(q.shape[:2], dtype=torch.bool)
        starts[:, 0] = again
        return memory, Documents.of(starts, q.device)

    def start_after(self, prefix: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """prefix (1, P, d_model) -> its outputs (1, P, H D) and the weights (H, d_in, d_out) after writing it."""
        y, state = self(prefix, chunk_size=prefix_chunk(self.gates.rule, self.config.chunk_size, prefix.shape[1]))
        return y, tuple(w[0] for w in state.memory.weights)

    def first_weights(self, learned: tuple[Tensor, ...], rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """M_0 as :meth:`read` takes it, (B, H, d_in, d_out), from the learned weights (H, d_in, d_out)."""
        met = self.gates.rule.met
        return tuple(met(w.to(dtype)).expand(rows, *w.shape) for w in learned)

    def end_weights(self, state: NeuralMemoryState) -> tuple[Tensor, ...]:
        """Weights of ``state`` as :meth:`read` takes them, at the end of a chunk."""
        return self._met(state.memory)

    def _met(self, memory: MemoryState) -> tuple[Tensor, ...]:
        return memory.chunk_weights if self.gates.rule.nonlinear else memory.weights

    def read(self, q: Tensor, weights: tuple[Tensor, ...], norm: tuple[Tensor, Tensor] | None) -> Tensor:
        """q (B, T, H, D), weights (B, H, d_in, d_out) of a state -> M(q), (B, T, H, D); nothing is written."""
        return self._normalised(self._answer(q, weights, norm))

    def _answer(self, q: Tensor, weights: tuple[Tensor, ...], norm: tuple[Tensor, Tensor] | None) -> Tensor:
        return memory_read(q, weights, network=self.shape, norm=norm, rule=self.gates.rule)

    def _normalised(self, y: Tensor) -> Tensor:
        return self.output_norm(y.to(self.output_norm.weight.dtype))

    # ---- costs, for the plan and the FLOP count

    def flops(self, length: int) -> Flops:
        """Per token of a document of ``length``: the projections, the gates, the memory and its caches; the short
        convolutions are element-wise."""
        d_model, width, heads = self.q.linear.in_features, self.q.linear.out_features, self.q.n_heads
        total = 3 * product(d_model, width) + self.gates.flops() + heads * inner_flops(self.shape, self.config)
        return total if self.caching is None else total + self.caching.flops(length, width, self.read_flops())

    def read_flops(self) -> Flops:
        """Per token that only reads, from a given query, and writes nothing."""
        once = self.q.n_heads * sum(product_flops(self.shape))
        return Flops(once, 2 * once)

    def kept_state_bytes(self, length: int) -> int:
        """Bytes kept for the backward pass of a row of ``length`` tokens: fp32 weights, momentum and chunk weights at
        every save_every-th block, and caches."""
        heads = self.q.n_heads
        if self.caching is None:
            return kept_bytes(self.shape, self.config, heads, length)
        piece = min(length, self.caching.config.segment)
        cache = 4 * heads * sum(a * b for a, b in self.shape.layers)
        return -(-length // piece) * (kept_bytes(self.shape, self.config, heads, piece) + cache)

    @property
    def piece(self) -> int:
        """Number of tokens after which every token reads the same number of memories."""
        return 1 if self.caching is None else self.caching.config.segment * (self.caching.config.slots + 1)

    def unserved(self, dtype: torch.dtype) -> str | None:
        """Reason why the fused kernels would not serve it on a GPU, for inputs of ``dtype``; None if they would."""
        return unserved(dtype, self.shape, self.config.chunk_size, self.config.alpha == "channel", rule=self.gates.rule)

    def scratch_bytes(self) -> int:
        """Scratch bytes of the fused kernels, shared by all layers."""
        from titans_pt.kernels.memory.fused.operators import SCRATCH_BYTES

        return SCRATCH_BYTES
