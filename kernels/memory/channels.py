"""An alpha for each channel: coefficients of blocks.

Row d of M, which x @ M multiplies by channel d of x, decays with a_t[d] = 1 - alpha_t[d]. In a block that starts at
(M, S), with the gradients u_i = x_i g_i^T of the chunk's start, row d of the recurrence in naive.py unrolls to

    M_t[d] = A_t[d] M[d] + B_t[d] S[d] - sum_{i<=t} P[t, i, d] theta_i x_i[d] g_i
    P[t, i] = a_t P[t-1, i] + E[t, i]       E[t, i] = prod_{i<l<=t} eta_l
    A_t = a_t A_{t-1}, A_0 = 1              B_t = a_t B_{t-1} + m_t, B_0 = 0, m_t = prod_{l<=t} eta_l

Queries then read (A_t z_t) M + (B_t z_t) S - sum_i R[t, i] theta_i g_i with R[t, i] = sum_d z_t[d] P[t, i, d]
x_i[d], without a weight set for each token. P is a tensor (block, block, d_in), computed by the recurrence above:
blocks are short, and gates may be exactly 0 or 1. Gated linear attention avoids this tensor by scaling queries and
keys, but divides products of decays by one another; and with momentum P is a sum of products, which does not
factor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHANNELWISE_BLOCK = 16
"""Most tokens of a compute block if every channel has its own alpha: for each layer, P is this many times as large as
the keys."""


@dataclass
class ChannelCoefficients:
    """Coefficients of a block for one layer with an alpha per channel; d is the layer's d_in. Counterpart of
    :class:`coefficients.Coefficients`, with methods that take and return the same.

    A, B: (N, c, d). P: (N, c, c, d). m: (N, 1, 1), weight of the first S in the last S. e: (N, c, 1), E of the last
    token, times theta. theta: (N, c, 1).
    """

    A: Tensor
    B: Tensor
    P: Tensor
    m: Tensor
    e: Tensor
    theta: Tensor

    def through(self, band: Tensor) -> "ChannelCoefficients":
        P = torch.einsum("ntid,nik->ntkd", self.P, self.theta * band)
        return ChannelCoefficients(self.A, self.B, P, self.m, band.mT @ self.e, torch.ones_like(band[:, :1].mT))

    def seen(self, z: Tensor, x: Tensor, g: Tensor, W: Tensor, S: Tensor) -> Tensor:
        # (N, c, c, d) times (N, c, d, 1): R, in one pass over P.
        scores = (self.P * x.unsqueeze(1) @ z.unsqueeze(-1)).squeeze(-1) * self.theta.mT
        return (self.A * z) @ W + (self.B * z) @ S - scores @ g

    def after(self, x: Tensor, g: Tensor, W: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        a, b, p = self.A[:, -1, :, None], self.B[:, -1, :, None], self.P[:, -1] * self.theta
        return a * W + b * S - (p * x).mT @ g, self.m * S - x.mT @ (self.e * g)


def channel_coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> list[ChannelCoefficients]:
    """Coefficients of n blocks for Titans' own update, the only one that is served here.

    theta, eta: (n, N, c, 1). alpha: (n, N, c, d). valid: (n, N, c), or None if all tokens are valid; invalid tokens
    change nothing.
    """
    keep, writes = 1 - alpha, torch.ones_like(eta)
    if valid is not None:
        valid = valid.unsqueeze(-1)
        theta, eta, keep, writes = (
            torch.where(valid, g, float(fill)) for g, fill in ((theta, 0), (eta, 1), (keep, 1), (writes, 0))
        )
    A, m = torch.cumprod(keep, -2), torch.cumprod(eta, -2)
    each = torch.eye(eta.shape[-2], dtype=eta.dtype, device=eta.device).unsqueeze(-1)
    E, b, p, B, P = torch.zeros_like(eta), torch.zeros_like(keep[..., 0, :]), torch.zeros_like(keep), [], []
    tokens = zip(each, *(gate.unbind(-2) for gate in (eta, keep, writes, m)), strict=True)
    for here, eta_t, keep_t, writes_t, m_t in tokens:
        E = E * eta_t.unsqueeze(-2) + here
        b = keep_t * b + writes_t * m_t
        p = keep_t.unsqueeze(-2) * p + writes_t.unsqueeze(-2) * E
        B.append(b)
        P.append(p)
    parts = A, torch.stack(B, -2), torch.stack(P, -3), m[..., -1:, :], E * theta, theta
    return [ChannelCoefficients(*block) for block in zip(*(part.unbind() for part in parts), strict=True)]
