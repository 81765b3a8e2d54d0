"""The memory MLP M(x) itself, on explicit weights, and the derivatives of its activations."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import Weights

LN_EPS = 1e-5

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


def _gelu_curvature(z: Tensor) -> Tensor:
    return (2 - z * z) * torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _silu_curvature(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 - s) * (2 + z * (1 - 2 * s))


def _silu_pulled_back(upstream: Tensor, z: Tensor) -> Tensor:
    """SiLU's backward pass, written out: blockwise.py differentiates it, and PyTorch's operator has no derivative."""
    s = torch.sigmoid(z)
    return upstream * (s * (1 + z * (1 - s)))


PULLED_BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "silu": _silu_pulled_back,
    "relu": lambda upstream, z: torch.ops.aten.threshold_backward(upstream, z, 0),
}
"""(upstream, z) -> upstream times the activation's slope at z; itself differentiable."""

CURVATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu_curvature,
    "silu": _silu_curvature,
    "relu": torch.zeros_like,
}
"""Second derivative of each activation: the outer loop differentiates the inner gradient."""


def layer_norm(f: Tensor, norm: Weights) -> Tensor:
    """LayerNorm over the last dimension with affine parameters that broadcast against ``f``."""
    return F.layer_norm(f, f.shape[-1:], eps=LN_EPS) * norm[0] + norm[1]


def finish(f: Tensor, x: Tensor, norm: Weights | None, network: NetworkShape) -> Tensor:
    """Steps after the last matrix: M(x) = x + LN(f), without the parts that are switched off."""
    if network.norm:
        assert norm is not None
        f = layer_norm(f, norm)
    return x + f if network.residual else f


def forward(
    x: Tensor, weights: Weights, norm: Weights | None, network: NetworkShape, inputs: Tensor | None = None
) -> Tensor:
    """M(x): (..., T, D) -> (..., T, D) through weights (..., d_in, d_out); norm parameters (..., 1, D).

    inputs: input of the first matrix, if it is not x.
    """
    act = ACTIVATIONS[network.activation]
    z = (x if inputs is None else inputs) @ weights[0]
    for w in weights[1:]:
        z = act(z) @ w
    return finish(z, x, norm, network)
