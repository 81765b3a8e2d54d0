"""Blocks of a rule that erases: each token removes a share of M's content along the layer's input (Rule.steps).

With a = 1 - alpha, M_t = a_t M_{t-1} + S_t - b_t x_t y_t, with the row y_t = x_t^T a_t M_{t-1} and the erased share
b_t. If y were known, erasing would be one more sum over the block that decays like M:

    M_t = A_t W + B_t S - sum_{i<=t} x_i (P[t, i] theta_i g_i^T + D[t, i] b_i y_i)

(letters as in chunked.py). Multiplying the equation for M_{t-1} by x_t^T a_t gives a triangular system for y:

    y_t + sum_{i<t} D[t, i] b_i (x_t . x_i) y_i
        = a_t (A_{t-1} x_t^T W + B_{t-1} x_t^T S - sum_i P[t-1, i] theta_i (x_t . x_i) g_i^T)

This is the delta rule's system (kernels/linear_memory), with e = x, w = b x. Inputs x and gradients g are taken at the
chunk's start.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.memory.coefficients import Coefficients, coefficients
from titans_pt.kernels.memory.rules import Rule


@dataclass
class Decay:
    """Decay of a block. keep: a, (..., c, 1). reach: D, (..., c, c), the share of write i that is left at token t."""

    keep: Tensor
    reach: Tensor

    @staticmethod
    def of(alpha: Tensor, valid: Tensor | None) -> "list[Decay]":
        """Decays of n blocks, from alpha (n, N, c, 1) and valid (n, N, c) or None."""
        keep, reach = decay(alpha.squeeze(-1), valid)
        return [Decay(*block) for block in zip(keep.unsqueeze(-1).unbind(), reach.unbind(), strict=True)]


def decay(alpha: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """a and D, from alpha (..., n, N, c) and valid (n, N, c) or None. An invalid token writes nothing."""
    reach = coefficients(torch.ones_like(alpha), torch.zeros_like(alpha), alpha, valid)[2]
    return 1 - alpha if valid is None else torch.where(valid, 1 - alpha, 1.0), reach


@dataclass
class Erasing(Coefficients):
    """Coefficients of one layer that erases. rows: y, (N, c, d_out). erased: D b, weights of y in M_t, (N, c, c)."""

    rows: Tensor
    erased: Tensor

    def sums(self, alike: Tensor, g: Tensor) -> Tensor:
        return super().sums(alike, g) + alike * self.erased @ self.rows

    def written(self, g: Tensor) -> Tensor:
        return super().written(g) + self.erased[..., -1, :, None] * self.rows


def erasing(
    rule: Rule, c: Coefficients, decay: Decay, theta: Tensor, x: Tensor, g: Tensor, W: Tensor, S: Tensor
) -> Erasing:
    """Coefficients of one layer that erases, from c, its coefficients for theta = 1.

    theta (N, c, 1), x (N, c, d_in), g (N, c, d_out); W, S (N, d_in, d_out) at the block's start.
    """
    steps = rule.steps(theta, x)
    assert steps is not None  # the rule erases
    short, share = steps
    c = replace(c, mix=c.mix * short.mT, e=c.e * short)
    A, B, mix = (_before(each, first) for each, first in ((c.A, 1.0), (c.B, 0.0), (c.mix, 0.0)))
    alike = x @ x.mT
    known = decay.keep * (A * (x @ W) + B * (x @ S) - (mix * alike) @ g)
    erased = decay.reach * share.mT
    rows = torch.linalg.solve_triangular((erased * alike).tril(-1), known, upper=False, unitriangular=True)
    return Erasing(c.A, c.B, c.mix, c.m, c.e, rows, erased)


def _before(x: Tensor, first: float) -> Tensor:
    """Shift (N, c, .) by one token: each token gets the row of the token before it, the first one ``first``."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=first)
