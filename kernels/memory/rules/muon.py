"""Muon at chunk ends: a chunk takes one step along its momentum, orthogonalised or merely normalised."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from titans_pt.config import Section
from titans_pt.kernels.memory.coefficients import coefficients
from titans_pt.kernels.memory.rules.base import RULES, Own, OwnGate, Rule, SquaredError

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of one step, X <- a X + (b A + c A^2) X with A = X X^T, by Keller Jordan: five steps bring singular values
between 0.7 and 1.2."""
STEPS = 5
LEAST = 0.1
"""Constant added to the momentum's norm: steps vanish with the errors, and gradients through them stay bounded. With
0.01 gradients over 1,024 tokens are a thousand times as large in small heads and chunks."""


def scaled(momentum: Tensor) -> Tensor:
    """Momentum (..., a, b) scaled to a Frobenius norm below 1."""
    return momentum / (torch.linalg.vector_norm(momentum, dim=(-2, -1), keepdim=True) + LEAST)


def newton_schulz(x: Tensor) -> Tensor:
    """The nearest matrix (..., a, b) with all singular values 1, roughly, from x with a Frobenius norm below 1."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT).mT
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def orthogonal(momentum: Tensor) -> Tensor:
    """Momentum (..., a, b), orthogonalised by :func:`newton_schulz`."""
    return newton_schulz(scaled(momentum))


def orthogonal_flops(d_in: int, d_out: int) -> float:
    """FLOPs of :func:`orthogonal` for one matrix."""
    small, large = sorted((d_in, d_out))
    return STEPS * (4.0 * small * small * large + 2.0 * small**3)


def unit(momentum: Tensor) -> Tensor:
    """Momentum (..., a, b) scaled to the norm of an orthogonal matrix, sqrt(min(a, b))."""
    return min(momentum.shape[-2:]) ** 0.5 * scaled(momentum)


class StepSettings(Section):
    """Settings of rules that take one step a chunk."""

    size: Annotated[float, Field(gt=0.0)] = 0.03
    """Largest step of a chunk, as a share of sqrt(inputs) + sqrt(outputs) of a matrix, about the spectral norm of a
    random one: 0.03 makes steps of 0.72 for 64 and 256. A gate of the chunk's last token, 0 to 1, multiplies it."""


class ChunkSteps(Rule):
    """S_t = eta_t S_{t-1} - theta_t u_t for every token, and one step a chunk of C tokens that starts at F:

        M = (prod_t (1 - alpha_t)) F + size_C S_C'

    S' is S, orthogonalised or normalised. size is a gate of the chunk's last token; inside S' it would cancel. The
    scale of theta cancels there: theta only decides the share of each token.
    """

    Settings: ClassVar[type[Section]] = StepSettings
    settings: StepSettings
    gates: dict[str, OwnGate] = {"size": OwnGate(start=0.5, share=True)}

    def direction(self, momentum: Tensor) -> Tensor:
        """S' from S: orthogonalised."""
        return orthogonal(momentum)

    def closing_flops(self, d_in: int, d_out: int) -> float:
        return orthogonal_flops(d_in, d_out)

    def update(self, weights, momentum, gradient, theta, eta, alpha, own):
        return (1 - alpha) * weights, eta * momentum - theta * gradient

    def coefficients(self, theta, eta, alpha, own, valid):
        A, B, mix, m, e = coefficients(theta, eta, alpha, valid)
        return A, torch.zeros_like(B), torch.zeros_like(mix), m, e

    def closed(self, weights: Tensor, momentum: Tensor, own: Own) -> Tensor:
        a, b = weights.shape[-2:]
        return weights + self.settings.size * (a**0.5 + b**0.5) * own[-1] * self.direction(momentum)


@RULES.register
class Muon(ChunkSteps, SquaredError):
    """Titans' squared error with the optimiser Muon in place of plain steps (ATLAS, arXiv 2505.23735, Eq. 32-33), at
    chunk ends.

    ATLAS orthogonalises S for every token, which takes a hundred times as long as the memory itself. Eq. 57-58 print
    the step size inside the orthogonal map, where it cancels. form=unit is the control: the same step in S's own
    direction.
    """

    name: ClassVar[str] = "muon"

    class Settings(StepSettings):
        form: Literal["orthogonal", "unit"] = "orthogonal"
        """Map of the momentum S. orthogonal: five Newton-Schulz steps. unit: S over its norm, as long as an orthogonal
        matrix; costs nothing.
        """

    settings: Settings

    def direction(self, momentum: Tensor) -> Tensor:
        return super().direction(momentum) if self.settings.form == "orthogonal" else unit(momentum)

    def closing_flops(self, d_in: int, d_out: int) -> float:
        return super().closing_flops(d_in, d_out) if self.settings.form == "orthogonal" else 0.0
