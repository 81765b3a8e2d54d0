"""Omega, the rule of ATLAS (arXiv 2505.23735): each token writes the gradients of a window."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from titans_pt.config import Section
from titans_pt.kernels.memory.rules.base import RULES, Own, OwnGate, SquaredError


class WindowSettings(Section):
    """Settings of rules in which a token writes the gradients of several."""

    window: Annotated[int, Field(ge=1, le=64)] = 4
    """Tokens whose gradients each token writes, itself among them. Each gradient is multiplied by a gate of the token
    that writes. Those of the previous chunk's tokens are taken again at the current chunk's start (ATLAS, Eq. 16)."""
    degree: Literal[1, 2] = 1
    """Degree of the polynomial features of keys and queries. 1: keys and queries themselves. 2: also the products of
    their channels, for small heads: the first matrix takes in 152 numbers for a head of width 16, 2,144 for 64."""


class WindowRule(SquaredError):
    """Titans' squared error over a window: u_t = grad sum_{j<c} g_j(t) ||M(phi(k_{t-j})) - v_{t-j}||^2."""

    Settings: ClassVar[type[Section]] = WindowSettings
    settings: WindowSettings
    compiled_loss = "squared"  # features of degree 2 are wider, and C does not serve them

    def __init__(self, settings: Section | None = None):
        super().__init__(settings)
        self.window = self.settings.window
        starts = [0.9] + [0.5] * (self.window - 1)
        self.gates = {f"window_{j}": OwnGate(start=start, share=True) for j, start in enumerate(starts)} | self.gates

    def share(self, v: Tensor, own: Own) -> Tensor | None:
        """A token's step is a sum over its window; the share keeps it at most as long as one step of Titans."""
        return self.shares(own).sum(-1).clamp(min=1).reciprocal()

    def features(self, x: Tensor) -> Tensor:
        """Features with phi(x) . phi(y) = (x . y + (x . y)^2 / 2) / 1.5; of length 1 if x is."""
        if self.settings.degree == 1:
            return x
        i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        squares = x[..., i] * x[..., j] * torch.where(i == j, 0.5**0.5, 1.0).to(x.dtype)
        return torch.cat([x, squares], -1) * 1.5**-0.5

    def width(self, width: int) -> int:
        return width if self.settings.degree == 1 else width + width * (width + 1) // 2


@RULES.register
class Omega(WindowRule):
    """Titans' steps, momentum and forgetting, with a window of gradients. OmegaNet is this without momentum
    (model.memory.momentum=false).

    The paper prints an outer product with the sign of ascent (Eq. 11, 55). It leaves open the degree, the window of its
    headline, and whether phi's coefficients, "from 1/i!", are learned; here they are fixed.
    """

    name: ClassVar[str] = "omega"
