"""The neural long-term memory as a layer: projections, gates and the learned M_0 around kernels.memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import MemoryConfig
from titans_pt.kernels.memory import MemoryState, NetworkShape, memory_read, neural_memory, unserved
from titans_pt.kernels.memory.blockwise import CHANNELWISE_BLOCK
from titans_pt.kernels.memory.chunked import MAX_BLOCK
from titans_pt.kernels.memory.rules import Rule
from titans_pt.kernels.memory.soup import Soup
from titans_pt.kernels.memory.state import state_dtype
from titans_pt.layers.caching import Caches, Caching
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard

DEEP = 3
"""Weight matrices from which on a memory is chaotic at the steps that two take: a small change of M_0 grows from chunk
to chunk, and the outer gradient with it, a thousandfold over 64 chunks with four. They take smaller steps, from smaller
weights, and still smaller ones toward long values (docs/notebook.md, "Deep memories are chaotic")."""


def takes_small_steps(config: MemoryConfig) -> bool:
    return config.depth >= DEEP and config.deep_steps == "small"


def default_step_bound(config: MemoryConfig) -> float:
    """Largest theta / (1 - eta) that is known to be stable, for ||M(k) - v||^2 with unit keys.

    A chunk takes C gradients at one point. If all its keys are equal, a linear memory's error is multiplied by
    1 - 2 C theta: it grows above 1 / C. Without a LayerNorm C times the bound therefore stays below 1. Under one, which
    bounds the output, it stays below 2: 0.1 holds up to C = 16, 0.03 at C = 64. A quarter of that for three matrices,
    an eighth for four.
    """
    bound = min(0.1, (1.9 if config.norm else 0.95) / config.chunk_size) * Rule.of(config).step
    return bound / 2 ** (config.depth - 1) if takes_small_steps(config) else bound


def of_chunk(config: MemoryConfig, chunk: int) -> MemoryConfig:
    """Settings of a memory that has another chunk size than ``model.memory.chunk_size``. A step bound that was set for
    that one is lowered to the largest that is stable here."""
    other = config.model_copy(update={"chunk_size": chunk})
    if config.step_bound is None or chunk <= config.chunk_size:
        return other
    return other.model_copy(update={"step_bound": min(config.step_bound, default_step_bound(other))})


def prefix_chunk(rule: Rule, chunk: int, tokens: int) -> int:
    """Chunk size with which a memory with chunks of ``chunk`` takes a prefix of ``tokens``. A rule that writes where
    chunks end must not find the last one unfinished: the largest size up to ``chunk`` that divides the prefix."""
    if not rule.nonlinear:
        return chunk
    return next(size for size in range(min(chunk, tokens), 0, -1) if tokens % size == 0)


def default_init_std(config: MemoryConfig, shape: NetworkShape, d_in: int) -> float:
    """Initial standard deviation of a weight matrix of M_0 with ``d_in`` inputs.

    Under a LayerNorm a step moves the output by theta / std^2, so that smaller weights make up for the smaller steps of
    deep memories: what they recall of a chunk is then what memories of two matrices do.
    """
    if not shape.norm:
        return d_in**-0.5
    return (8 / shape.hidden) ** 0.5 if takes_small_steps(config) else 0.5


def network_shape(width: int, config: MemoryConfig) -> NetworkShape:
    """The memory's network in heads of this width."""
    inputs = Rule.of(config).width(width)
    return NetworkShape(
        width, config.expansion * width, config.depth, config.norm, config.residual, config.activation,
        None if inputs == width else inputs,
    )  # fmt: skip


def _products(shape: NetworkShape) -> list[int]:
    """FLOPs of one vector's product with each of a head's weight matrices."""
    return [2 * a * b for a, b in shape.layers]


def _block(config: MemoryConfig) -> int:
    """Tokens of a compute block."""
    if config.alpha == "channel":
        return min(config.chunk_size, CHANNELWISE_BLOCK)
    return config.chunk_size if Rule.of(config).nonlinear else min(config.chunk_size, MAX_BLOCK)


def inner_flops(shape: NetworkShape, config: MemoryConfig) -> Flops:
    """Per token and head: every product of the exact dual form (kernels/memory/dual.py) at the compute block in use.
    What an alpha per channel adds is element-wise."""
    rule, block = Rule.of(config), _block(config)
    if rule.nonlinear:
        return stale_flops(shape, config)
    start = config.forget_to == "start"  # then queries also meet M_0
    inner = 3 if config.alpha == "head" else 0  # products for the gradients of one gate for a whole matrix
    forward = backward = 0.0
    again, written = _window_factors(rule, block)
    for n, weights in enumerate(_products(shape)):
        pull = n > 0  # the error goes down through every layer but the first
        within = 2 * block * written * sum(shape.layers[n])
        products = again * (1 + pull) + 2 * written + 2 + start
        once = products * weights + within + _erasing_flops(rule, shape.layers[n], block, reads=True)
        forward += once
        backward += 2 * once + inner * weights / block
    return Flops(forward, backward)


def _erasing_flops(rule: Rule, layer: tuple[int, int], block: int, reads: bool) -> float:
    """Per token and head, of one matrix: what it holds along a block's inputs, the inputs' products with each other,
    the triangular system, and what queries do not find any more."""
    if not rule.erases:
        return 0.0
    d_in, d_out = layer
    return 4 * d_in * d_out + block * (2 * d_in + 3 * d_out + 2 * reads * d_out)


def _window_factors(rule: Rule, block: int) -> tuple[float, float]:
    """Keys of which a block of tokens takes gradients, and keys that it writes, each per token of the block."""
    written = 1 + (rule.window - 1) / block
    return 1.0 if rule.border == "carry" else written, written


def stale_flops(shape: NetworkShape, config: MemoryConfig) -> Flops:
    """Per token and head of a memory that is read as it was at its chunk's start (kernels/memory/blockwise.py): keys
    forward and back, two sums over the chunk, queries forward, what its rule makes of it at the chunk's end; in the
    backward pass all of it again, and twice."""
    rule, products = Rule.of(config), _products(shape)
    again, written = _window_factors(rule, config.chunk_size)
    once = (again + 2 * written + 1) * sum(products) + again * sum(products[1:])
    once += sum(rule.closing_flops(*layer) for layer in shape.layers) / config.chunk_size
    block = min(config.chunk_size, MAX_BLOCK)
    once += sum(_erasing_flops(rule, layer, block, reads=False) for layer in shape.layers)
    return Flops(once, 3 * once)


def read_flops(shape: NetworkShape) -> Flops:
    """Per token and head of one more read of the memory of a chunk's start, which the backward pass repeats."""
    return Flops(sum(_products(shape)), 3 * sum(_products(shape)))


def kept_bytes(shape: NetworkShape, config: MemoryConfig, heads: int, length: int) -> int:
    """See :meth:`NeuralMemory.kept_state_bytes`."""
    one = heads * sum(a * b for a, b in shape.layers)
    blocks = -(-length // _block(config))
    return 12 * one * -(-blocks // (config.save_every or math.isqrt(blocks)))


STRETCH = 0.05
"""Reach of a hard gate's sigmoid beyond 0 and 1 before it is cut."""


class _Cut(torch.autograd.Function):
    """Clamps x to [0, 1] with a straight-through gradient, so that a clamped gate can reopen.

    It is the same in both directions: one that passes only where it leads back into the range pulls a gate off the 0
    that would be best, by its noise alone.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx, d_gate: Tensor) -> Tensor:
        return d_gate


def share_for(v: Tensor) -> Tensor:
    """v (B, T, H, D) -> which share of theta a deep memory takes to write it, (B, T, H) in fp32 (fp64)."""
    short = 0.5 * v.shape[-1] ** 0.5
    return short / torch.linalg.vector_norm(v.to(state_dtype(v)), dim=-1).clamp(min=short)


def _hard(share: Tensor) -> Tensor:
    """A sigmoid's value stretched and cut: a gate that reaches 0 and 1."""
    return _Cut.apply((1 + 2 * STRETCH) * share - STRETCH)


def _logit(gate: float, hard: bool = False) -> float:
    """Argument of the sigmoid for a gate inside (0, 1)."""
    share = (gate + STRETCH) / (1 + 2 * STRETCH) if hard else gate
    return math.log(share / (1 - share))


class WriteGate(nn.Module):
    """A sigmoid's value -> the share of the largest step that a token takes. A module for those who watch it:
    ``model.memory.write_cost``."""

    def __init__(self, hard: bool):
        super().__init__()
        self.hard = hard

    def forward(self, share: Tensor) -> Tensor:
        return _hard(share) if self.hard else share


class Gates(nn.Module):
    """Ranges of theta, eta, alpha and the memory rule's own gates, whatever their numbers are read off.

    theta = bound (1 - eta) gate(.): under a constant eta a token's surprise is written with bound gate in all, however
    long momentum carries it. An eta that rises after the token carries it further than that. A token writes theta times
    an error that grows with its value, and the curvature that a step meets grows with it. Deep memories, which have no
    room for that, take min(1, sqrt(D) / (2 ||v||)) of theta.
    With theta="free" it is softplus(.), any positive number: Titans, Eq. 10, has "theta_t" without a range or a
    non-linearity, and softplus is the usual one for a step without a bound (Mamba's, for example).
    """

    def __init__(self, config: MemoryConfig):
        super().__init__()
        self.config = config
        self.writes = config.writes
        """False from some token on leaves the memory as it is there."""
        self.layers = config.depth if config.per_layer_gates else 1
        self.bound = config.step_bound or default_step_bound(config)
        self.free = config.theta == "free"
        self.write = WriteGate(config.gates == "hard" and not self.free)
        self.damped = config.theta == "bounded" and takes_small_steps(config)
        self.rule = Rule.of(config)

    @property
    def starts(self) -> tuple[float, float, float]:
        """Numbers of which theta, eta and alpha are what they are configured to be at initialisation."""
        hard = self.config.gates == "hard"
        theta, eta, alpha = self.config.theta_init, self.config.eta_init, self.config.alpha_init
        step = math.log(math.expm1(self.bound * (1 - eta) * theta)) if self.free else _logit(theta, hard)
        return step, _logit(eta), _logit(alpha, hard)

    @property
    def own_starts(self) -> list[float]:
        """The same of the rule's own gates."""
        gates = self.rule.gates.values()
        return [_logit(gate.start) if gate.share else math.log(math.expm1(gate.start)) for gate in gates]

    def opened(self, raw: Tensor, alpha: Tensor | None, own: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor, ...]:
        """theta, eta, alpha, own gates.

        Args:
            raw: (..., L, 3), numbers of each layer's gates; (..., L, 2) where alpha has its own.
            alpha: None, or (..., channels).
            own: each (...).
            v: (..., D), the values that will be written.

        Returns:
            theta, eta (..., L), alpha (..., L or channels), own each (...).
        """
        if alpha is None:
            share, eta, alpha = torch.sigmoid(raw).unbind(-1)
        else:
            share, eta = torch.sigmoid(raw).unbind(-1)
            alpha = torch.sigmoid(alpha)
        share = self.write(F.softplus(raw[..., 0]) / self.bound if self.free else share)
        if self.config.gates == "hard":
            # Not momentum: at 1 the surprise of a token would be added again with every later one, for ever.
            alpha = _hard(alpha)
        if not self.config.momentum:
            eta = torch.zeros_like(eta)
        if not self.config.forgetting:
            alpha = torch.zeros_like(alpha)
        theta = self.bound * share if self.free else self.bound * (1 - eta) * share
        if self.damped:
            theta = theta * share_for(v).unsqueeze(-1)
        own = tuple(
            torch.sigmoid(each) if gate.share else F.softplus(each)
            for gate, each in zip(self.rule.gates.values(), own, strict=True)
        )
        if self.config.theta == "bounded":
            share = self.rule.share(v.to(theta.dtype), tuple(gate.unsqueeze(-1) for gate in own))
            theta = theta if share is None else theta * share.unsqueeze(-1)
        if not self.writes:  # times 0: every parameter keeps a gradient, which data parallelism counts on
            theta, eta, alpha = 0 * theta, 0 * eta, 0 * alpha
        return theta, eta, alpha, *own


class MemoryGates(Gates):
    """x (B, T, d_model) -> theta, eta, alpha, each (B, T, H), or (B, T, H, L) with per_layer_gates, and the memory
    rule's own gates, each (B, T, H); fp32. alpha is (B, T, H, channels) with alpha="channel", from two linear layers of
    a low rank between them.
    """

    sharding = {"linear": Shard.COLUMN, "alpha_in": Shard.SUMMED, "alpha_out": Shard.COLUMN, "own": Shard.COLUMN}
    per_rank = ("n_heads",)

    def __init__(self, d_model: int, n_heads: int, config: MemoryConfig, channels: int):
        super().__init__(config)
        self.n_heads = n_heads
        self.alpha_in = self.alpha_out = None
        if config.alpha == "channel":
            self.alpha_in = nn.Linear(d_model, config.alpha_rank, bias=False)
            self.alpha_out = nn.Linear(config.alpha_rank, n_heads * channels)
        self.kinds = 3 if self.alpha_out is None else 2
        self.linear = nn.Linear(d_model, self.kinds * n_heads * self.layers)
        self.own = nn.Linear(d_model, n_heads * len(self.rule.gates)) if self.rule.gates else None

    def own_initialisation(self):
        """Starts the gates nearly constant at their configured values.

        A hard alpha needs this: next to its cut it is fifty times as steep as a sigmoid. Under weights like the
        others' a tenth would be forgotten at some tokens from the first step on.
        """
        starts = self.starts
        with torch.no_grad():
            self.linear.bias.view(self.n_heads, self.layers, self.kinds).copy_(torch.tensor(starts[: self.kinds]))
            if self.alpha_out is not None:
                self.alpha_out.bias.fill_(starts[2])
            if self.own is not None:
                self.own.bias.view(self.n_heads, -1).copy_(torch.tensor(self.own_starts))
            if self.config.gates == "hard":
                linear = self.linear.weight.view(self.n_heads, self.layers, self.kinds, -1)[:, :, 2:]
                (linear if self.alpha_out is None else self.alpha_out.weight).zero_()

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """v (B, T, H, D): the values that will be written."""
        raw = self.linear(x)
        raw = raw.to(state_dtype(x))
        raw = raw.unflatten(-1, (self.n_heads, self.layers, self.kinds))  # heads outermost: they split over ranks
        alpha, own = None, ()
        if self.alpha_out is not None:
            alpha = self.alpha_out(self.alpha_in(x)).to(state_dtype(x)).unflatten(-1, (self.n_heads, -1))
        if self.own is not None:
            own = self.own(x).to(state_dtype(x)).unflatten(-1, (self.n_heads, -1)).unbind(-1)
        theta, eta, alpha, *own = self.opened(raw, alpha, own, v)
        if self.layers == 1:
            theta, eta = theta.squeeze(-1), eta.squeeze(-1)
            alpha = alpha.squeeze(-1) if self.alpha_out is None else alpha
        return theta, eta, alpha, *own

    def flops(self) -> Flops:
        """Per token."""
        linear = (self.linear, self.alpha_in, self.alpha_out, self.own)
        return sum((product(x.in_features, x.out_features) for x in linear if x is not None), Flops(0, 0))


class Projection(nn.Module):
    """Linear, causal convolution, SiLU, and for queries and keys unit length: (B, T, d_model) -> (B, T, H, D).

    affine: the linear layer has a bias, and there is no SiLU (model.memory.projections).

    The filters of values, which have no unit length, begin as the identity: a value is its own token's, and may become
    more. Mixed with the tokens before by random filters, the pairs of a chunk, all written with the gradient at its
    start, add up to one sum in which no value can be told from its neighbours', and recall is learned late or never
    (docs/notebook.md, "The bag of values").
    """

    sharding = {"linear": Shard.COLUMN, "conv": Shard.COLUMN}
    per_rank = ("n_heads",)

    def __init__(self, d_model: int, n_heads: int, conv_width: int, unit: bool, affine: bool = False):
        super().__init__()
        self.n_heads, self.unit, self.affine = n_heads, unit, affine
        self.linear = nn.Linear(d_model, d_model, bias=affine)
        self.conv = ShortConvolution(d_model, conv_width, of_values=not unit)
        if not unit:
            self.conv.begin_as_identity()

    def forward(
        self, x: Tensor, state: Tensor | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        width = y.shape[-1] // self.n_heads
        y, state = self.conv(y, state, documents, silu=not self.affine, unit=width if self.unit else 0)
        return y.unflatten(-1, (self.n_heads, width)), state


class MemoryNetwork(nn.Module):
    """The learned start of the memory MLP, M_0, and its LayerNorm, which the inner loop leaves alone.

    A module that hands out its parameters (as copies) when it is called: code that shards parameters by module (ZeRO-3)
    then has them whole wherever they are used. Weight decay leaves them alone: M_0 is the start of a state under a
    LayerNorm, and the smaller it is the larger every inner step.
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
        """``depth`` weights (H, d_in, d_out), and the LayerNorm's (weight, bias), each (H, D), or None."""
        weights, norm = self.learned()
        return tuple(w.clone() for w in weights), norm and tuple(p.clone() for p in norm)

    def learned(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        """The parameters themselves."""
        weights = tuple(getattr(self, f"weight_{n}") for n in range(self.shape.depth))
        return weights, (self.norm_weight, self.norm_bias) if self.shape.norm else None


@dataclass
class NeuralMemoryState:
    """memory: see MemoryState. q, k, v: (B, conv_width - 1, d_model), the convolutions' last inputs.

    start: M_0, L tensors (B, H, d_in, d_out), of a memory that forgets to it and that began elsewhere than at the
    learned weights: after a prefix. The same for every row, which share its memory. Else None.
    caches: of a memory with caching.
    """

    memory: MemoryState
    q: Tensor
    k: Tensor
    v: Tensor
    start: tuple[Tensor, ...] | None = None
    caches: Caches | None = None


class NeuralMemory(nn.Module):
    """(B, T, d_model) -> M_t(q_t) of every token, (B, T, d_model), heads side by side, each normalised (RMS).

    A prefix (persistent tokens) is the same for every row and document: it is written once, to a memory of its own,
    whose weights are then where every document begins. Its momentum ends with it (S_0 = 0 at a document's start).
    """

    sharding = {"": Shard.ENTER, "output_norm": Shard.SUMMED}

    def __init__(self, d_model: int, n_heads: int, conv_width: int, config: MemoryConfig, norm_eps: float):
        super().__init__()
        if d_model % n_heads or (config.norm and n_heads == d_model):
            raise ValueError(
                f"n_heads: given {n_heads}; must divide d_model={d_model}, and under a LayerNorm, which makes a "
                "constant of a head of width 1, be below it"
            )
        self.config = config
        affine = config.projections == "affine"
        self.q = Projection(d_model, n_heads, conv_width, unit=True, affine=affine)
        self.k = Projection(d_model, n_heads, conv_width, unit=True, affine=affine)
        self.v = Projection(d_model, n_heads, conv_width, unit=False, affine=affine)
        self.shape = network_shape(d_model // n_heads, config)
        self.gates = MemoryGates(d_model, n_heads, config, self.shape.channels)
        self.network = MemoryNetwork(n_heads, self.shape, config)
        self.caching = None if config.caching is None else Caching(d_model, n_heads, config.caching)
        self.output_norm = RMSNorm(d_model // n_heads, eps=norm_eps)

    def forward(
        self,
        x: Tensor,
        state: NeuralMemoryState | None = None,
        documents: Documents | None = None,
        start: tuple[Tensor, ...] | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, NeuralMemoryState]:
        """start: M_0 in place of the learned one (see :meth:`start_after`); a state remembers it where that matters.
        chunk_size: of a call that begins and ends a sequence, whose memory is not cached; None: the configured one."""
        if state is not None and (state.caches is None) != (self.caching is None):
            raise ValueError("state: given one of a memory with other caching; pass a state of this memory")
        q, q_state = self.q(x, state and state.q, documents)
        k, k_state = self.k(x, state and state.k, documents)
        v, v_state = self.v(x, state and state.v, documents)
        weights, norm = self.network()
        if start is None and state and state.start:
            start = tuple(w[0] for w in state.start)
        tokens, before = (q, k, v, *self.gates(x, v)), state and state.memory
        run = partial(self._along, start or weights, norm, chunk_size or self.config.chunk_size)
        caches = None
        if self.caching is None or chunk_size:
            y, memory = run(tokens, before, documents)
        else:
            given = self.caching, run, norm, x, tokens, before, state and state.caches, documents
            if torch.compiler.is_compiling():  # each of its pieces would be compiled
                # Not at the top: importing torch's compiler takes seconds.
                from titans_pt.kernels.memory import uncompiled

                y, memory, caches = uncompiled.run(self._cached, *given)
            else:
                y, memory, caches = self._cached(*given)
        kept = None
        if start and self.config.forget_to == "start":
            kept = tuple(w.expand(len(x), *w.shape) for w in start)
        return self._normalised(y).flatten(-2), NeuralMemoryState(memory, q_state, k_state, v_state, kept, caches)

    def _along(
        self, start: tuple[Tensor, ...], norm: tuple[Tensor, Tensor] | None, chunk_size: int,
        tokens: tuple[Tensor, ...], before: MemoryState | None, documents: Documents | None, soup: Soup | None = None,
    ) -> tuple[Tensor, MemoryState]:  # fmt: skip
        """The memory along ``tokens``, q, k, v and gates: outputs (B, T, H, D), and the state after them."""
        q, k, v, theta, eta, alpha, *own = tokens
        y, after = neural_memory(
            q, k, v, theta, eta, alpha, start,
            network=self.shape,
            norm=norm,
            rule=self.gates.rule,
            own=tuple(own),
            chunk_size=chunk_size,
            forget_to=self.config.forget_to,
            initial_state=before,
            output_final_state=True,
            reset=documents and documents.starts,
            max_resets=documents and documents.most,
            save_every=self.config.save_every,
            soup=soup,
        )  # fmt: skip
        assert after is not None
        return y, after

    def _cached(
        self, caching: Caching, run: Callable, norm: tuple[Tensor, Tensor] | None, x: Tensor,
        tokens: tuple[Tensor, ...], memory: MemoryState | None, caches: Caches | None, documents: Documents | None,
    ) -> tuple[Tensor, MemoryState, Caches]:  # fmt: skip
        """Segment by segment: what the memory answers together with its caches, its state, and the caches after it."""
        caches = caches or caching.begin(tokens[1])
        u, found, outputs = caching.vectors(x), caching.cut(caches, x.shape[1], documents), []
        given = tokens if u is None else (*tokens, u)
        # Cut once: the backward pass of every slice by itself would fill a tensor of the whole length.
        parts = zip(*(t.split([piece.end - piece.begin for piece in found], 1) for t in given), strict=True)
        for piece, own in zip(found, parts, strict=True):
            vectors = None
            if u is not None:
                *own, vectors = own
            here = documents.cut(piece.begin, piece.end) if documents and any(piece.new_document) else None
            caches = caching.begun(caches, piece.new_document)
            shares = caching.shares(vectors, own[1], caches)
            soup = Soup(caches.weights, shares) if caching.config.soup and caches.weights else None
            y, memory = run(tuple(own), memory, here, soup)
            if soup is None:
                y = y * shares[..., :1]
                for n, weights in enumerate(caches.weights, 1):
                    y = y + shares[..., n : n + 1] * self._answer(own[0], weights, norm)
            outputs.append(y)
            caches = caching.after(caches, piece, own[1], self._met(memory))
        assert memory is not None, "no token is in no piece"
        return torch.cat(outputs, 1), memory, caches

    def start_after(self, prefix: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """prefix (1, P, d_model) -> its outputs (1, P, d_model) and the weights (H, d_in, d_out) after writing it."""
        y, state = self(prefix, chunk_size=prefix_chunk(self.gates.rule, self.config.chunk_size, prefix.shape[1]))
        return y, tuple(w[0] for w in state.memory.weights)

    def first_weights(self, learned: tuple[Tensor, ...], rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """M_0 as :meth:`read` wants it, (B, H, d_in, d_out), of the learned weights (H, d_in, d_out)."""
        met = self.gates.rule.met
        return tuple(met(w.to(dtype)).expand(rows, *w.shape) for w in learned)

    def end_weights(self, state: NeuralMemoryState) -> tuple[Tensor, ...]:
        """The same after ``state``, where its chunk has ended."""
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

    # ---- what the plan and the FLOP count ask

    def flops(self, length: int) -> Flops:
        """Per token of a document of ``length``: the projections, the gates, the memory and its caches; the short
        convolutions are element-wise."""
        width, heads = self.q.linear.in_features, self.q.n_heads
        total = 3 * product(width, width) + self.gates.flops() + heads * inner_flops(self.shape, self.config)
        return total if self.caching is None else total + self.caching.flops(length, width, self.read_flops())

    def read_flops(self) -> Flops:
        """Per token that is read without being written, its query given."""
        once = self.q.n_heads * sum(_products(self.shape))
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
        """Tokens after which a token reads as many memories as any later one."""
        return 1 if self.caching is None else self.caching.config.segment * (self.caching.config.slots + 1)

    def unserved(self, dtype: torch.dtype) -> str | None:
        """Reason why the fused kernels would not serve it on a GPU, for inputs of ``dtype``; None if they would."""
        return unserved(dtype, self.shape, self.config.chunk_size, self.config.alpha == "channel", rule=self.gates.rule)

    def scratch_bytes(self) -> int:
        """Scratch bytes of the fused kernels, shared by all layers."""
        from titans_pt.kernels.memory.fused.operators import SCRATCH_BYTES

        return SCRATCH_BYTES
