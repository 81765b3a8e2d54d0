"""The memory MLP M(x) itself, on explicit weights: forward, and the gradient of its inner loss written out."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.memory.state import Weights

LN_EPS = 1e-5

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


def _gelu_slope(z: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    return cdf + z * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu_slope,
    "silu": _silu_slope,
    "relu": lambda z: (z > 0).to(z.dtype),
}
"""Derivative of each activation, differentiable in turn (the outer loop needs the second derivative)."""


def layer_norm(f: Tensor, norm: Weights) -> Tensor:
    """LayerNorm over the last dimension with affine parameters that broadcast against ``f``."""
    return F.layer_norm(f, f.shape[-1:], eps=LN_EPS) * norm[0] + norm[1]


def finish(f: Tensor, x: Tensor, norm: Weights | None, residual: bool) -> Tensor:
    """What follows the last matrix: M(x) = x + LN(f), without the parts that are switched off."""
    y = f if norm is None else layer_norm(f, norm)
    return x + y if residual else y


def forward(x: Tensor, weights: Weights, norm: Weights | None, residual: bool, activation: str) -> Tensor:
    """M(x): (..., T, D) -> (..., T, D) through weights (..., d_in, d_out); norm parameters (..., 1, D)."""
    act = ACTIVATIONS[activation]
    z = x @ weights[0]
    for w in weights[1:]:
        z = act(z) @ w
    return finish(z, x, norm, residual)


def inner_gradient(
    k: Tensor, v: Tensor, weights: Weights, norm: Weights | None, residual: bool, activation: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Rank-one factors of the gradient of ||M(k) - v||^2 with respect to every weight matrix.

    Returns (inputs, errors), L tensors each: the gradient of layer n at token i is inputs[n][i] (outer) errors[n][i].
    Shapes (..., T, d_in) and (..., T, d_out). Differentiable.
    """
    act, slope = ACTIVATIONS[activation], SLOPES[activation]
    inputs, hidden = [k], []
    z = k @ weights[0]
    for w in weights[1:]:
        hidden.append(z)
        inputs.append(act(z))
        z = inputs[-1] @ w
    if norm is None:
        error = 2 * ((k + z if residual else z) - v)
    else:
        centred = z - z.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + LN_EPS)
        unit = centred * scale
        y = unit * norm[0] + norm[1]
        upstream = 2 * ((k + y if residual else y) - v) * norm[0]
        mean = upstream.mean(-1, keepdim=True)
        along = (upstream * unit).mean(-1, keepdim=True)
        error = (upstream - mean - unit * along) * scale
    errors = [error]
    for w, z in zip(reversed(weights[1:]), reversed(hidden), strict=True):
        errors.append((errors[-1] @ w.transpose(-1, -2)) * slope(z))
    return inputs, errors[::-1]
