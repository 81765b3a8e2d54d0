"""Rotary position embedding (Su et al., arXiv 2104.09864), in halves as in Llama."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """x (B, T, H, D), D even, position (T,) int64 -> x turned by its position, in x's dtype.

    Angles are computed in fp64: at ten million tokens an fp32 angle is off by half a radian.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = position.to(torch.float64)[:, None] * frequency
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (f(angle).to(dtype)[:, None] for f in (torch.cos, torch.sin))  # (T, 1, D / 2)
    a, b = x[..., :half].to(dtype), x[..., half:].to(dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
