"""Coefficients of all blocks of tokens at once, computed from the gates; the letters are those of chunked.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.common import first_derivatives_only


@dataclass
class Coefficients:
    """The coefficients of blocks of c tokens, (..., c, 1) or (..., c, c).

    A, B: weights of the block's first M and S in M_t. mix: P[t, i] theta_i, what of token i's gradient is in M_t.
    m: (..., 1, 1), weight of the first S in the last one. e: E[c, i] theta_i, what of token i's gradient is in that.
    """

    A: Tensor
    B: Tensor
    mix: Tensor
    m: Tensor
    e: Tensor

    def through(self, band: Tensor) -> "Coefficients":
        """The same coefficients for single keys, where a token's gradient is a sum over keys: ``band`` (..., c, keys)
        has the factor of each key in each token's sum, theta included."""
        return Coefficients(self.A, self.B, self.mix @ band, self.m, band.mT @ self.e)


@dataclass
class Ends:
    """Coefficients of a block's last state: a, b, m (..., 1, 1), weights of its first M and S in its last M, and of S
    in the last S.

    p, e: (..., c, 1), weight of each token's gradient in the last M, and in the last S.
    """

    a: Tensor
    b: Tensor
    m: Tensor
    p: Tensor
    e: Tensor

    def through(self, band: Tensor) -> "Ends":
        """Counterpart of :meth:`Coefficients.through`."""
        return Ends(self.a, self.b, self.m, band.mT @ self.p, band.mT @ self.e)

    @staticmethod
    def of(c: Coefficients) -> "Ends":
        return Ends(c.A[..., -1:, :], c.B[..., -1:, :], c.m, c.mix[..., -1, :, None], c.e)


def coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
    """Gates (G, n, N, c), valid (n, N, c) or None -> the fields of Coefficients for every block at once.

    A token that is not valid changes nothing.
    """
    keep = 1 - alpha
    if valid is not None:
        theta, eta, keep = (torch.where(valid, g, float(fill)) for g, fill in ((theta, 0), (eta, 1), (keep, 1)))
    return _Coefficients.apply(theta, eta, keep, valid)


class _Coefficients(torch.autograd.Function):
    """Written out: autograd's backward pass of a cumulative product is slow where a factor is 0."""

    @staticmethod
    def forward(ctx, theta: Tensor, eta: Tensor, keep: Tensor, valid: Tensor | None):
        decay, momentum = running_products(keep), running_products(eta)
        to_m = decay[..., 1:, 1:]
        if valid is not None:
            to_m = to_m * valid.unsqueeze(-2)
        reached = to_m @ momentum[..., 1:, :]  # B beside P
        ctx.save_for_backward(theta, eta, keep, valid, decay, momentum, reached)
        e = momentum[..., -1, 1:] * theta
        return (
            decay[..., 1:, :1].clone(), reached[..., :1].clone(), reached[..., 1:] * theta.unsqueeze(-2),
            momentum[..., -1:, :1].clone(), e.unsqueeze(-1),
        )  # fmt: skip

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_a: Tensor, d_b: Tensor, d_mix: Tensor, d_m: Tensor, d_e: Tensor):
        theta, _, _, valid, decay, momentum, reached = saved
        d_e = d_e.squeeze(-1)
        d_theta = (d_mix * reached[..., 1:]).sum(-2).addcmul_(d_e, momentum[..., -1, 1:])
        d_reached = torch.cat([d_b, d_mix * theta.unsqueeze(-2)], -1)
        to_m = decay[..., 1:, 1:]
        d_to_m = d_reached @ momentum[..., 1:, :].mT
        if valid is not None:
            valid = valid.unsqueeze(-2)
            to_m, d_to_m = to_m * valid, d_to_m * valid
        d_momentum = torch.zeros_like(momentum)
        d_momentum[..., 1:, :] = to_m.mT @ d_reached
        d_momentum[..., -1:, :1].add_(d_m)
        d_momentum[..., -1, 1:].addcmul_(d_e, theta)
        d_decay = torch.zeros_like(decay)
        d_decay[..., 1:, :1] = d_a
        d_decay[..., 1:, 1:] = d_to_m
        return d_theta, _products_vjp(d_momentum, momentum), _products_vjp(d_decay, decay), None


def running_products(gate: Tensor) -> Tensor:
    """(..., c) -> (..., c + 1, c + 1): the product of gates i + 1 .. t at [t, i], i <= t, else 0.

    Row t is what tokens 1 .. t have left of what was there after token i; i = 0 is before the block. No quotients, no
    logarithms: a gate may be 0.
    """
    size = gate.shape[-1] + 1
    below = torch.ones(size, size, dtype=torch.bool, device=gate.device).tril(-1)
    factors = torch.where(below, torch.nn.functional.pad(gate, (1, 0)).unsqueeze(-1), 1.0)
    return factors.cumprod(-2).tril_()


def _products_vjp(upstream: Tensor, products: Tensor) -> Tensor:
    """The gates' gradient, (..., c), from that of their running products R (row 0 has none).

    Gate l is a factor of R[t, i] for i < l <= t, and R[t, i] = R[t, l] gate_l R[l - 1, i].
    """
    return (products[..., :, 1:].mT @ upstream).mul_(products[..., :-1, :]).sum(-1)
