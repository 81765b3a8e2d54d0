"""Coefficients of all blocks of tokens at once, computed from the gates; letters as in chunked.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.common import first_derivatives_only


@dataclass
class Coefficients:
    """The coefficients of blocks of c tokens, (..., c, 1) or (..., c, c).

    A, B: weights of the block's first M and S in M_t. mix: P[t, i] theta_i, weight of token i's gradient in M_t. Where
    no token reads what its own block writes, these three may have the last token's row alone.
    m: (..., 1, 1), weight of the first S in the last S. e: E[c, i] theta_i, weight of token i's gradient in the last S.
    """

    A: Tensor
    B: Tensor
    mix: Tensor
    m: Tensor
    e: Tensor

    def through(self, band: Tensor) -> "Coefficients":
        """Coefficients of single keys, if a token's gradient is a sum over keys.

        band: (..., c, keys), the factor of each key in each token's sum, theta included.
        """
        return Coefficients(self.A, self.B, self.mix @ band, self.m, band.mT @ self.e)

    def seen(self, z: Tensor, x: Tensor, g: Tensor, W: Tensor, S: Tensor) -> Tensor:
        """Output of a layer for inputs z (N, c, d_in), each with its token's M_t: z_t M_t, (N, c, d_out).

        x (N, c, d_in) and g (N, c, d_out): the tokens' gradients are x^T g. W, S (N, d_in, d_out): the block's first.
        """
        return (self.A * z) @ W + (self.B * z) @ S - self.sums(z @ x.mT, g)

    def sums(self, alike: Tensor, g: Tensor) -> Tensor:
        """Contribution of the block's own writes to :meth:`seen`. alike: z . x, (N, c, c)."""
        return alike * self.mix @ g

    def after(self, x: Tensor, g: Tensor, W: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """W and S after the block; arguments as in :meth:`seen`."""
        a, b = self.A[..., -1:, :], self.B[..., -1:, :]
        return a * W + b * S - x.mT @ self.written(g), self.m * S - x.mT @ (self.e * g)

    def written(self, g: Tensor) -> Tensor:
        """Factor of each token beside its x in the sum that the last M loses, (N, c, d_out)."""
        return self.mix[..., -1, :, None] * g


@dataclass
class Ends:
    """Coefficients of a block's last state.

    a, b, m: (..., 1, 1), weights of the first M and S in the last M, and of the first S in the last S.

    p, e: (..., c, 1), weight of each token's gradient in the last M, and in the last S.
    """

    a: Tensor
    b: Tensor
    m: Tensor
    p: Tensor
    e: Tensor

    @staticmethod
    def of(c: Coefficients) -> "Ends":
        return Ends(c.A[..., -1:, :], c.B[..., -1:, :], c.m, c.mix[..., -1, :, None], c.e)


def coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
    """Fields of Coefficients for every block at once, from gates (G, n, N, c) and valid (n, N, c) or None.

    An invalid token changes nothing.
    """
    keep = 1 - alpha
    if valid is not None:
        theta, eta, keep = (torch.where(valid, g, float(fill)) for g, fill in ((theta, 0), (eta, 1), (keep, 1)))
    return _Coefficients.apply(theta, eta, keep, valid)


class _Coefficients(torch.autograd.Function):
    """The backward pass is written out, because autograd's for a cumulative product is slow where a factor is 0."""

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

    [t, i] is the share of the content after token i that is left after token t; i = 0 is before the block. No
    quotients, no logarithms: a gate may be 0.
    """
    size = gate.shape[-1] + 1
    below = torch.ones(size, size, dtype=torch.bool, device=gate.device).tril(-1)
    factors = torch.where(below, torch.nn.functional.pad(gate, (1, 0)).unsqueeze(-1), 1.0)
    return factors.cumprod(-2).tril_()


def _products_vjp(upstream: Tensor, products: Tensor) -> Tensor:
    """Gradient of the gates, (..., c), from the gradient of their running products R (row 0 has none).

    Gate l is a factor of R[t, i] for i < l <= t, and R[t, i] = R[t, l] gate_l R[l - 1, i].
    """
    return (products[..., :, 1:].mT @ upstream).mul_(products[..., :-1, :]).sum(-1)
