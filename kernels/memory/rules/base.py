"""The contract of a memory rule: the loss that the memory learns by, and what its gates do with the gradient."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from titans_pt.config import MemoryConfig, NoSettings, Section
from titans_pt.config.sections import Need, own_section
from titans_pt.kernels.common import recordable, recording
from titans_pt.kernels.memory.coefficients import coefficients
from titans_pt.registry import Registry

RULES: "Registry[Rule]" = Registry("titans_pt.kernels.memory.rules", "model.memory.rule")
"""Every rule by the name that ``model.memory.rule`` gives it."""

Own = tuple[Tensor, ...]
"""A rule's own gates for some tokens, in the order of :attr:`Rule.gates`: each (..., 1)."""


@dataclass(frozen=True)
class OwnGate:
    """A rule's own gate besides theta, eta and alpha: a number per token and head, computed from the token.

    share: True for a sigmoid, in (0, 1); False for a softplus, above 0. start: its value at initialisation.
    """

    start: float
    share: bool = False


_FORMULAS = {
    "gradient": {"loss"},
    "gradient_backward": {"loss", "gradient"},
    "compiled_loss": {"loss", "gradient", "features"},
    "compiled_steps": {"steps"},
}
"""Members that restate others as a formula or in C. A subclass that redefines one of the others must not inherit its
parent's formula; without its own it has Rule's."""


class Rule:
    """One memory rule. A frozen value: two rules of one class with equal settings are equal.

    A rule is one file: it subclasses this, is decorated with ``@RULES.register``, and nothing outside knows its name.
    A rule must define only :meth:`loss`. Each weight matrix of the memory then follows

        S_t = eta_t S_{t-1} - theta_t grad_W loss(M(k_t), v_t)       M_t = (1 - alpha_t) M_{t-1} + S_t

    A rule that updates M differently overrides :meth:`update` and :meth:`coefficients`; tests compare the two.
    Non-linear steps (:meth:`closed`, :meth:`met`) happen at chunk ends: M accumulates within a chunk, whose keys and
    queries use the result of the previous chunk's end.
    docs/architecture.md has the recipe.
    """

    name: ClassVar[str]
    """Name of the rule in ``model.memory.rule``."""
    Settings: ClassVar[type[Section]] = NoSettings
    """Its own section of the settings, ``model.memory.<name>``."""
    gates: dict[str, OwnGate] = {}
    """Its own gates, by name."""
    compiled_loss: str | None = None
    """This loss in kernels/memory/native: "squared", or "huber", whose threshold is the first own gate (yaad.py). None:
    the C code does not serve the rule. A subclass with its own loss or features does not inherit it. C has no features:
    a rule whose features are sometimes the keys and queries themselves tells C by :meth:`width`."""
    compiled_steps: bool = False
    """Whether :meth:`steps` equals the formula in kernels/memory/native: step = b = theta / (1 + theta ||x||^2)."""
    step: float = 1.0
    """Factor of the default step bound (model.memory.step_bound=null): this rule's largest stable step, relative to the
    squared loss."""
    needs_norm: ClassVar[bool] = False
    """Whether steps diverge in memories of two and more matrices without a LayerNorm, which bounds the error."""

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        own = vars(cls)
        if "update" in own and "coefficients" not in own:
            raise TypeError(f"{cls.__name__}: update without coefficients, which the fast forms read; define both")
        for formula, sources in _FORMULAS.items():
            if sources & own.keys() and formula not in own:
                setattr(cls, formula, getattr(Rule, formula))
        gates = own.get("gates")
        if isinstance(gates, dict) and not all(isinstance(gate, OwnGate) for gate in gates.values()):
            raise TypeError(f"{cls.__name__}.gates: given {gates}; allowed: name -> OwnGate(start=...)")

    def __init__(self, settings: Section | None = None):
        self.settings = settings or self.Settings()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.settings == self.settings

    def __hash__(self) -> int:
        return hash((type(self), self.settings.model_dump_json()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings!r})"

    @classmethod
    def of(cls, config: MemoryConfig) -> "Rule":
        """The rule that the settings name, with its own section of settings.

        Raises:
            UserError: no rule has this name, or one of the rule's settings is wrong.
        """
        found = RULES.find(config.rule)
        return found(own_section(config.section(found.name), found.Settings, f"model.memory.{found.name}"))

    @classmethod
    def check(cls, config: MemoryConfig, need: Need):
        """Call ``need`` for every condition that links the rule's settings to the rest of model.memory."""
        need(
            config.alpha == "head" or cls.coefficients is Rule.coefficients,
            "model.memory.alpha",
            config.alpha,
            f"must be head with model.memory.rule={cls.name}, which moves the memory its own way",
        )
        need(
            not cls.needs_norm or config.norm or config.depth == 1,
            "model.memory.norm",
            config.norm,
            f"must be true with model.memory.rule={cls.name} and depth {config.depth}, whose steps diverge without the "
            "LayerNorm",
        )

    # ---- the loss

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        """Loss of M(k) = v + ``error``, (..., D) -> (...).

        Args:
            error: M(k) - v.
            v: the value itself, for losses that depend on more than the error.
            own: its own gates, each (..., 1).
        """
        raise NotImplementedError

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        """Gradient of the loss in M(k), (..., D); differentiable if gradients are enabled. Uses autograd; a rule may
        override it with a formula, which is faster."""
        wanted = torch.is_grad_enabled()
        with recording():
            error, v, *gates = recordable((error, v, *own))
            error = error if error.requires_grad else error.detach().requires_grad_()
            loss = self.loss(error, v, tuple(gates))
            if loss.shape != error.shape[:-1]:  # broadcasting would mix tokens
                raise TypeError(
                    f"{type(self).__name__}.loss: returned {tuple(loss.shape)} for errors {tuple(error.shape)}; must "
                    f"be {tuple(error.shape[:-1])}: summed over the last dimension, each own gate with squeeze(-1)"
                )
            (found,) = torch.autograd.grad(loss.sum(), error, create_graph=wanted)
        return found

    def gradient_backward(
        self, upstream: Tensor, error: Tensor, v: Tensor, own: Own
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Backward pass of :meth:`gradient`. ``upstream`` is the gradient of its result. Returns the gradients of
        error, of v without its part through error (None: zero), and of each own gate."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (error, v, *own)]
            found = self.gradient(leaves[0], leaves[1], tuple(leaves[2:]))
            if not found.requires_grad:
                return torch.zeros_like(error), None, [torch.zeros_like(gate) for gate in own]
            d_error, d_v, *d_own = torch.autograd.grad(found, leaves, upstream, allow_unused=True)
        # Second derivatives of the l1 norm are ZeroTensors of PyTorch, and callers write into their gradients.
        d_error, d_v = (None if d is None else d.clone() for d in (d_error, d_v))
        d_own = [torch.zeros_like(gate) if d is None else d.clone() for gate, d in zip(own, d_own, strict=True)]
        return torch.zeros_like(error) if d_error is None else d_error, d_v, d_own

    # ---- windows of gradients, and features of keys and queries

    window: int = 1
    """Number of tokens whose gradients each token writes, its own among them. Those of the previous chunk's tokens are
    computed again at the current chunk's start."""

    def shares(self, own: Own) -> Tensor:
        """Factors of the window's gradients, (..., window), the token's own first; own (..., 1) each. By default these
        are the first own gates."""
        if len(own) < self.window:
            raise TypeError(f"{type(self).__name__}: a window of {self.window} needs as many gates of its own, or "
                            f"shares; it has {len(own)}")  # fmt: skip
        return torch.cat(own[: self.window], -1)

    def features(self, x: Tensor) -> Tensor:
        """Input of the first matrix for a key or query x, (..., D) -> (..., width(D))."""
        return x

    def width(self, width: int) -> int:
        """Width of :meth:`features` for a head of this width."""
        return width

    @property
    def plain(self) -> bool:
        """Whether the rule has neither window nor features, erases nothing and does nothing at chunk ends."""
        whole = type(self).features is Rule.features and not self.erases and not self.nonlinear
        return self.window == 1 and whole

    def share(self, v: Tensor, own: Own) -> Tensor | None:
        """Share of a bounded theta that a token uses, 0 to 1, (...): below 1 if its step would be too long. None: 1.

        Args:
            v: (..., D).
            own: each (..., 1).
        """
        return None

    # ---- updates by the gates

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, own: Own
    ) -> tuple[Tensor, Tensor]:
        """M and S (..., d_in, d_out) after one token, by the definition. Gates broadcast against them.

        weights: M, or with forget_to="start" the difference M - M_0, which then decays.
        """
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + momentum, momentum

    def steps(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Step and erased share b of one layer, both (..., 1), for its input x (..., d_in). Before the token writes,
        M <- M - b x x^T M removes the share b of M's content along x. None: nothing is erased.

        theta: (..., 1); the returned step replaces it.
        """
        return None

    @property
    def erases(self) -> bool:
        """Whether the rule defines :meth:`steps`; a rule with steps has no window."""
        return type(self).steps is not Rule.steps

    def coefficients(
        self, theta: Tensor, eta: Tensor, alpha: Tensor, own: Own, valid: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Coefficients of :meth:`update` for blocks of c tokens.

        The fields of kernels.memory.coefficients.Coefficients: the weights of the block's first M and S, and of each
        token's gradient, in M and S after each token.

        Args:
            theta, eta, alpha: (G, n, N, c) of n blocks; G is 1, or the memory's layers.
            own: each (n, N, c, 1).
            valid: (n, N, c), or None if all tokens are valid; an invalid token changes nothing.
        """
        return coefficients(theta, eta, alpha, valid)

    # ---- non-linear steps at chunk ends

    def closed(self, weights: Tensor, momentum: Tensor, own: Own) -> Tensor:
        """M (..., d_in, d_out) after a chunk that ends with M = ``weights`` and S = ``momentum``.

        own: the own gates of the chunk's last token, each (..., 1, 1).
        """
        return weights

    def met(self, weights: Tensor) -> Tensor:
        """The matrix (..., d_in, d_out) that a chunk's keys and queries use if M = ``weights`` at its start."""
        return weights

    def closing_flops(self, d_in: int, d_out: int) -> float:
        """FLOPs of the matrix products in :meth:`closed` and :meth:`met`, of one matrix."""
        return 0.0

    @property
    def nonlinear(self) -> bool:
        """Whether the rule has :meth:`closed` or :meth:`met`; tokens then read the memory of their chunk's start."""
        return type(self).closed is not Rule.closed or type(self).met is not Rule.met


class SquaredError(Rule):
    """Titans' own loss, ||M(k) - v||^2, without the factor 1/2 that others use: our theta is half of theirs."""

    compiled_loss = "squared"

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return error.square().sum(-1)

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return 2 * error

    def gradient_backward(self, upstream: Tensor, error: Tensor, v: Tensor, own: Own):
        return 2 * upstream, None, [torch.zeros_like(gate) for gate in own]
