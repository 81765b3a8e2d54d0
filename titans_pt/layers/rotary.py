"""Rotary position embedding (Su et al., arXiv 2104.09864), in halves as in Llama."""

import math

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """x (B, T, H, D), D even, position (T,) or (B, T) int64 -> x turned by its position, in x's dtype.

    Turns are counted in fp64, at ten million tokens an fp32 angle is off by half a radian; cosine and sine of what is
    left of the last turn need no more than x's precision.
    """
    half = x.shape[-1] // 2
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half) / (2 * math.pi)
    turns = position.to(torch.float64).unsqueeze(-1) * frequency
    angle = (2 * math.pi * (turns - turns.round())).to(dtype).unsqueeze(-2)  # ([B,] T, 1, D / 2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].to(dtype), x[..., half:].to(dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
