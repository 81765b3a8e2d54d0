"""One call of the memory, and the interface of the implementations that serve it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titans_pt.kernels.memory.mlp import ACTIVATIONS
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Own, Rule, Titans
from titans_pt.kernels.memory.soup import Soup
from titans_pt.kernels.memory.state import MemoryState, Weights, state_dtype
from titans_pt.kernels.memory.window import no_tokens

FORGET_TO = ("start", "zero")

Read = Callable[[Tensor], Tensor]
"""(B, H, c, D) -> M(x), (B, H, c, D), at the weights of the chunk's start."""
Author = Callable[[Tensor, Read], tuple[Tensor, ...]]
"""Author of a memory's writes: (answers, read) -> keys, values, theta, eta, alpha and the rule's own gates.

answers: M(q) of c tokens, (B, H, c, D), at the weights of their chunk's start, which ``read`` queries again. Keys and
values (B, H, c, D), gates (B, G, c, 1 or L), own (B, G, c, 1), in the dtype of states. G is H, or less if neighbouring
heads share gates: heads 0 .. H / G - 1 have the first gate, and so on.
"""


def for_each(gates: Tensor, heads: int, dim: int = 1) -> Tensor:
    """Expand gates that neighbouring heads share to ``heads`` heads along ``dim``."""
    shared = heads // gates.shape[dim]
    return gates if shared == 1 else gates.repeat_interleave(shared, dim)


@dataclass(frozen=True, eq=False)
class MemoryCall:
    """All inputs of an implementation; :func:`titans_pt.kernels.memory.neural_memory` describes each.

    q, k, v: (B, T, H, D). theta, eta: (B, T, H, 1 or L); alpha also (B, T, H, network.channels); own: each (B, T, H,
    1); gates in the dtype of states. weights: L tensors (H, d_in, d_out). norm: two (H, D), or None. With an author k,
    v and gates only carry shapes, and all tokens read their chunk's start.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor
    eta: Tensor
    alpha: Tensor
    weights: Weights
    network: NetworkShape
    norm: Weights | None
    rule: Rule  # no default: Dynamo of PyTorch 2.11 cannot trace defaults that are objects
    own: Own = ()
    chunk_size: int = 16
    forget_to: str = "zero"
    state: MemoryState | None = None
    reset: Tensor | None = None
    max_resets: int | None = None
    save_every: int | None = None
    stale: bool = False
    soup: Soup | None = None
    author: Author | None = None

    @staticmethod
    def given(
        q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, weights: Weights,
        network: NetworkShape | None, norm: Weights | None, rule: Rule, own: Own,
        initial_state: MemoryState | None = None, **options: Any,
    ) -> "MemoryCall":  # fmt: skip
        """Call of a memory with given keys, values and gates.

        Gates and the state have any float dtype; gates with one number per head may be (B, T, H). network: None to
        derive it from weights and norm.
        """
        dtype = state_dtype(q)
        theta, eta, alpha = (g.to(dtype) if g.dim() == 4 else g.to(dtype).unsqueeze(-1) for g in (theta, eta, alpha))
        own = tuple(gate.to(dtype).unsqueeze(-1) for gate in own)
        shape, state = network or NetworkShape.of(weights, norm), initial_state and initial_state.to(dtype)
        return MemoryCall(q, k, v, theta, eta, alpha, weights, shape, norm, rule, own=own, state=state, **options)

    @staticmethod
    def authored(
        q: Tensor, author: Author, weights: Weights, network: NetworkShape | None, norm: Weights | None, rule: Rule,
        **options: Any,
    ) -> "MemoryCall":  # fmt: skip
        """Call of a memory with an author; q (B, T, H, D). Other arguments as in :meth:`given`."""
        gate = q.new_zeros(q.shape[:-1])
        own = (gate,) * len(rule.gates)
        return MemoryCall.given(
            q, q, q, gate, gate, gate, weights, network, norm, rule, own, stale=True, author=author, **options
        )

    @property
    def to_start(self) -> bool:
        return self.forget_to == "start"

    @property
    def reads_start(self) -> bool:
        """Whether tokens read the memory of their chunk's start."""
        return self.stale or self.rule.nonlinear

    @property
    def channelwise(self) -> bool:
        """Whether every channel has its own alpha."""
        return self.alpha.shape[-1] != self.theta.shape[-1]

    def of_rows(self) -> "MemoryCall":
        """Prepare the call for PyTorch operators: everything in the dtype of states, weights (B, H, d_in, d_out) and
        norm (B, H, D) for each row, and a state."""
        batch, dtype = self.q.shape[0], state_dtype(self.q)
        state = self.state
        if state is None:
            state = MemoryState.initial(self.weights, batch, dtype)
            state.chunk_weights = tuple(map(self.rule.met, state.weights))
        if self.rule.window > 1 and not state.recent:
            recent = no_tokens(self.rule, self.network, state.weights[0].flatten(2))
            state = replace(state, recent=recent)
        return replace(
            self,
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            weights=tuple(w.to(dtype).expand(batch, *w.shape) for w in self.weights),
            norm=None if self.norm is None else tuple(p.to(dtype).expand(batch, *p.shape) for p in self.norm),
            state=state,
        )

    def check(self):
        """Check shapes and settings. Messages are built only on errors, because generation checks every token.

        Raises:
            ValueError: shapes or a network do not fit.
        """
        q, k, v, theta, eta, alpha, weights = self.q, self.k, self.v, self.theta, self.eta, self.alpha, self.weights
        network, norm = self.network, self.norm
        if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape or not q.numel():
            wrong(f"q, k, v must share one shape (B, T, H, D) without zeros, got {[tuple(x.shape) for x in (q, k, v)]}")
        batch, length, heads, width = q.shape
        shapes = ((batch, length, heads, 1), (batch, length, heads, len(weights)))
        channels = (batch, length, heads, network.channels)
        if theta.shape != eta.shape or theta.shape not in shapes or alpha.shape not in (theta.shape, channels):
            wrong(
                f"theta, eta, alpha must share one of the shapes {((batch, length, heads), *shapes)}, or alpha have "
                f"{channels}, got {[tuple(g.shape) for g in (theta, eta, alpha)]}"
            )
        own = (batch, length, heads, 1)
        if len(self.own) != len(self.rule.gates) or any(gate.shape != own for gate in self.own):
            wrong(
                f"own must have a (B, T, H)={own[:3]} for each gate of the rule {self.rule.name}, "
                f"{', '.join(self.rule.gates) or 'none'}; got {[tuple(gate.shape[:3]) for gate in self.own]}"
            )
        ends = [self.rule.width(width), *(w.shape[2] for w in weights)]
        if ends[-1] != width or any(w.shape[:2] != (heads, d) for w, d in zip(weights, ends[:-1], strict=True)):
            wrong(
                f"weights must chain (H, d_in, d_out) from D to D with H={heads}, D={width}, "
                f"got {[tuple(w.shape) for w in weights]}"
            )
        if norm is not None and any(p.shape != (heads, width) for p in norm):
            wrong(f"norm must be two ({heads}, {width})")
        found = NetworkShape.of(weights, norm, network.residual, network.activation)
        if found.layers != network.layers or found.norm != network.norm:
            wrong(f"weights and norm are those of {found}, not of {network}")
        if network.activation not in ACTIVATIONS:
            wrong(f"activation {network.activation!r} is none of {', '.join(ACTIVATIONS)}")
        if self.chunk_size < 1:
            wrong(f"chunk_size {self.chunk_size} must be at least 1")
        if self.forget_to not in FORGET_TO:
            wrong(f"forget_to {self.forget_to!r} is none of {', '.join(FORGET_TO)}")
        if self.state is not None:
            self._check_state(self.state)
        if self.soup is not None and self.soup.shares.shape != (*q.shape[:3], 1 + len(self.soup.weights)):
            wrong(
                f"soup.shares must be {(*q.shape[:3], 1 + len(self.soup.weights))}, got {tuple(self.soup.shares.shape)}"
            )
        if self.reset is not None and (self.reset.dtype != torch.bool or self.reset.shape != q.shape[:2]):
            wrong(f"reset must be bool ({batch}, {length})")

    def _check_state(self, state: MemoryState):
        """Check that a state fits this memory. C and GPU kernels take raw addresses, and would read and write beyond
        the end of another memory's state."""
        batch, device = self.q.shape[0], self.q.device
        if any(s.device != device for s in (*state.weights, *state.momentum, *state.chunk_weights)):
            wrong(f"initial_state is on {state.weights[0].device}, q on {device}; titans_pt.move_state moves it")
        if len(state.offset) != batch:
            wrong(f"initial_state has {len(state.offset)} rows, q has {batch}")
        for name in ("weights", "momentum", "chunk_weights"):
            given = getattr(state, name)
            if len(given) != len(self.weights) or any(
                s.shape[0] != batch or s.shape[1:] != w.shape for s, w in zip(given, self.weights, strict=True)
            ):
                wrong(
                    f"initial_state is of another memory: its {name} are {[tuple(s.shape) for s in given]}, those of "
                    f"this one {[(batch, *w.shape) for w in self.weights]} (n_heads, depth, expansion)"
                )
        if state.recent:
            rule = self.rule
            if len(state.recent) != 3 + len(rule.gates) or state.recent[0].shape[2] != rule.window - 1:
                wrong(f"initial_state is of a rule with another window or gates than {rule.name} of {rule.window} "
                      "tokens")  # fmt: skip
        if torch.compiler.is_compiling() or state.offset.device.type != "cpu":
            return  # reading it would break the graph, or wait
        if (read := int(state.offset.max())) >= self.chunk_size:
            wrong(f"initial_state has read {read} tokens of a chunk, chunk_size is {self.chunk_size}; pass a state of "
                  "that chunk size")  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """One implementation.

    serves: reason for not serving a call, None if it does. run: outputs (B, T, H, D) and the state after them.
    """

    serves: Callable[[MemoryCall], str | None]
    run: Callable[[MemoryCall], tuple[Tensor, MemoryState]]


def rule_alone(rule: Rule, channelwise: bool = False, stale: bool = False, soup: bool = False) -> str | None:
    """Reason why kernels for Titans' own rule alone do not serve a call; None if they do.

    These kernels have one alpha per matrix, and tokens read M_t.
    """
    if soup:
        return "weights of several memories are read at once (model.memory.caching.soup)"
    if type(rule) is not Titans:  # not `rule != TITANS`: Dynamo of PyTorch 2.11 cannot compare their settings
        return f"the memory rule is {rule.name} (model.memory.rule); titans is served"
    if channelwise:
        return "alpha has one value per channel (model.memory.alpha=channel); alpha=head is served"
    return "tokens read the memory of their chunk's start (stale)" if stale else None


def wrong(message: str):
    raise ValueError(f"neural_memory: {message}")
