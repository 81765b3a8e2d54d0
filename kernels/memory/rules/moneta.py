"""Moneta of MIRAS (arXiv 2504.13173, Section 5): an l_p loss, and weights held near zero by an l_q norm."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from titans_pt.config import Section
from titans_pt.kernels.memory.rules.base import RULES, Own, Rule

TINY = 1e-6
"""Added to squares under a root, whose slope at 0 is infinite; the paper's value."""


@RULES.register
class Moneta(Rule):
    """The loss sum |e_i|^p of the error e = M(k) - v. Writes accumulate in A; a chunk uses, element by element,

        M = sign(A) |A|^(q-1) / mean(|A|^q)^((q-2)/q)

    This is the gradient of half the squared q-norm: the solution of "follow the regularised leader", from which the
    paper derives its update, with the dual norm as the regulariser. The paper prints A / ||A||_q^(q-2), without sign
    and power. With q = 4 the printed M shrinks as A grows: each write makes the next gradients larger, and forgetting
    makes M grow. Here M is of degree 1 in A, and means in place of sums give M and A the same size.
    """

    name: ClassVar[str] = "moneta"
    needs_norm: ClassVar[bool] = True

    class Settings(Section):
        p: Annotated[float, Field(ge=1.0, le=4.0)] = 3.0
        """Power of the error's coordinates in the loss. Above 2 large errors bend the loss more."""
        q: Annotated[float, Field(ge=2.0, le=8.0)] = 4.0
        """Norm of the accumulated writes A. A larger q lets fewer weights stand out. 2: M is A, retention is
        model.memory.forgetting alone."""

    settings: Settings

    def __init__(self, settings: Section | None = None):
        super().__init__(settings)
        self.step = 4 ** -abs(self.settings.p - 2) * 2 ** -(self.settings.q - 2)

    def share(self, v: Tensor, own: Own) -> Tensor | None:
        """The loss's curvature grows with the error's size to the power p - 2; for q > 2, M(A) adds a power of 1."""
        power = max(self.settings.p - 2, 0) + (self.settings.q > 2)
        return v.square().mean(-1).clamp(min=1).pow(-power / 2)

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        if self.settings.p < 2:
            return (error.square() + TINY).pow(self.settings.p / 2).sum(-1)
        return error.abs().pow(self.settings.p).sum(-1)

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        p = self.settings.p
        size = torch.sqrt(error.square() + TINY) if p < 2 else error.abs()
        return p * error * size.pow(p - 2)

    def met(self, weights: Tensor) -> Tensor:
        q = self.settings.q
        size = torch.sqrt(weights.square() + TINY)
        return weights * size.pow(q - 2) * size.pow(q).mean((-2, -1), keepdim=True).pow((2 - q) / q)
