"""Gates of a neural memory: step size, momentum, forgetting, their ranges, and the largest step that is stable."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import MemoryConfig
from titans_pt.kernels.memory.rules import Rule
from titans_pt.kernels.memory.state import state_dtype
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard

DEEP = 3
"""Number of weight matrices from which on a memory is chaotic at the step size that suits two.

A small change of M_0 grows from chunk to chunk, and the outer gradient with it: a thousandfold over 64 chunks with four
matrices. Deep memories therefore take smaller steps, from smaller initial weights, and still smaller steps towards long
values (docs/notebook.md, "Deep memories are chaotic")."""


def takes_small_steps(config: MemoryConfig) -> bool:
    return config.depth >= DEEP and config.deep_steps == "small"


def default_step_bound(config: MemoryConfig) -> float:
    """Largest theta / (1 - eta) that is known to be stable, for ||M(k) - v||^2 with unit keys.

    A chunk takes C gradients at one point. If all its keys are equal, a linear memory's error is multiplied by
    1 - 2 C theta: it grows if theta is above 1 / C. Without a LayerNorm, C times the bound therefore stays below 1. A
    LayerNorm bounds the output, and C times the bound stays below 2: the bound is 0.1 up to C = 16, and 0.03 at C = 64.
    It is a quarter of that for three matrices, an eighth for four.
    """
    bound = min(0.1, (1.9 if config.norm else 0.95) / config.chunk_size) * Rule.of(config).step
    return bound / 2 ** (config.depth - 1) if takes_small_steps(config) else bound


def of_chunk(config: MemoryConfig, chunk: int) -> MemoryConfig:
    """Memory settings with ``chunk`` in place of ``model.memory.chunk_size``. For a larger chunk, a configured step
    bound is lowered to the largest stable one."""
    other = config.model_copy(update={"chunk_size": chunk})
    if config.step_bound is None or chunk <= config.chunk_size:
        return other
    return other.model_copy(update={"step_bound": min(config.step_bound, default_step_bound(other))})


STRETCH = 0.05
"""Reach of a hard gate's sigmoid beyond 0 and 1 before it is cut."""


class _Cut(torch.autograd.Function):
    """Clamps x to [0, 1] with a straight-through gradient, so that a clamped gate can reopen.

    The gradient passes in both directions. If it passed only where it leads back into the range, its noise alone would
    pull a gate away from 0, even if 0 is best.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx, d_gate: Tensor) -> Tensor:
        return d_gate


def share_for(v: Tensor) -> Tensor:
    """Share of theta that a deep memory takes to write values v (B, T, H, D): (B, T, H) in fp32 (fp64)."""
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
    """A sigmoid's value -> the share of the largest step that a token takes. It is a module so that hooks can watch it
    (``model.memory.write_cost``)."""

    def __init__(self, hard: bool):
        super().__init__()
        self.hard = hard

    def forward(self, share: Tensor) -> Tensor:
        return _hard(share) if self.hard else share


class Gates(nn.Module):
    """Turns raw numbers, however they were computed, into theta, eta, alpha and the memory rule's own gates.

    theta = bound (1 - eta) gate(.): under a constant eta, momentum applies a token's surprise with a total weight of
    bound gate. If eta rises after the token, the total is larger. The error and the curvature of a step grow with the
    value's length; deep memories therefore take min(1, sqrt(D) / (2 ||v||)) of theta.
    With theta="free", theta is softplus(.), any positive number. Titans, Eq. 10, gives "theta_t" neither a range nor a
    non-linearity; softplus is the usual choice for a step without a bound (Mamba's, for example).
    """

    def __init__(self, config: MemoryConfig):
        super().__init__()
        self.config = config
        self.writes = config.writes
        """Whether tokens are written. If set to False after some token, the memory no longer changes from there on."""
        self.layers = config.depth if config.per_layer_gates else 1
        self.bound = config.step_bound or default_step_bound(config)
        self.free = config.theta == "free"
        self.write = WriteGate(config.gates == "hard" and not self.free)
        self.damped = config.theta == "bounded" and takes_small_steps(config)
        self.rule = Rule.of(config)

    @property
    def starts(self) -> tuple[float, float, float]:
        """Raw numbers that give theta, eta and alpha their configured initial values."""
        hard = self.config.gates == "hard"
        theta, eta, alpha = self.config.theta_init, self.config.eta_init, self.config.alpha_init
        step = math.log(math.expm1(self.bound * (1 - eta) * theta)) if self.free else _logit(theta, hard)
        return step, _logit(eta), _logit(alpha, hard)

    @property
    def own_starts(self) -> list[float]:
        """Raw numbers that give the rule's own gates their initial values."""
        gates = self.rule.gates.values()
        return [_logit(gate.start) if gate.share else math.log(math.expm1(gate.start)) for gate in gates]

    def opened(self, raw: Tensor, alpha: Tensor | None, own: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor, ...]:
        """Gates theta, eta, alpha and the rule's own, from raw numbers.

        Args:
            raw: (..., L, 3), numbers of each layer's gates; (..., L, 2) if alpha is given separately.
            alpha: numbers of alpha, (..., channels), or None.
            own: numbers of the rule's own gates, each (...).
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
            # Momentum is never hard: at eta = 1 a token's surprise would be added again with every later token.
            alpha = _hard(alpha)
        if not self.config.momentum:
            eta = torch.zeros_like(eta)
        if not self.config.forgetting:  # times 0: alpha's own linear layers, if it has them, keep a gradient
            alpha = 0 * alpha
        theta = self.bound * share if self.free else self.bound * (1 - eta) * share
        if self.damped:
            theta = theta * share_for(v).unsqueeze(-1)
        own = tuple(
            torch.sigmoid(each) if gate.share else F.softplus(each)
            for gate, each in zip(self.rule.gates.values(), own, strict=True)
        )
        if self.config.theta == "bounded":
            used = self.rule.share(v.to(theta.dtype), tuple(gate.unsqueeze(-1) for gate in own))
            theta = theta if used is None else theta * used.unsqueeze(-1)
        if not self.writes:  # times 0: every parameter keeps a gradient, which data parallelism counts on
            theta, eta, alpha = 0 * theta, 0 * eta, 0 * alpha
        return theta, eta, alpha, *own


class MemoryGates(Gates):
    """x (B, T, d_model) -> theta, eta, alpha, each (B, T, H), or (B, T, H, L) with per_layer_gates, and the memory
    rule's own gates, each (B, T, H); fp32. With alpha="channel", alpha is (B, T, H, channels), from a low-rank pair of
    linear layers.
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

        A hard alpha starts exactly constant, with weights of 0: next to its cut it is fifty times as steep as a
        sigmoid. With the other gates' weights, some tokens would forget a tenth from the first step on.
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
        alpha: Tensor | None = None
        own: tuple[Tensor, ...] = ()
        if self.alpha_in is not None and self.alpha_out is not None:
            alpha = self.alpha_out(self.alpha_in(x)).to(state_dtype(x)).unflatten(-1, (self.n_heads, -1))
        if self.own is not None:
            own = self.own(x).to(state_dtype(x)).unflatten(-1, (self.n_heads, -1)).unbind(-1)
        theta, eta, alpha, *opened = self.opened(raw, alpha, own, v)
        if self.layers == 1:
            theta, eta = theta.squeeze(-1), eta.squeeze(-1)
            alpha = alpha.squeeze(-1) if self.alpha_out is None else alpha
        return theta, eta, alpha, *opened

    def flops(self) -> Flops:
        """Per token."""
        linear = (self.linear, self.alpha_in, self.alpha_out, self.own)
        return sum((product(x.in_features, x.out_features) for x in linear if x is not None), Flops(0, 0))
