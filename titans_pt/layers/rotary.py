"""Rotary position embedding (Su et al., arXiv 2104.09864), in halves as in Llama."""

import functools
import math

import torch
from torch import Tensor

from titans_pt.config import RopeScaling


def turns(width: int, base: float, scaling: RopeScaling | None = None, device: torch.device | None = None) -> Tensor:
    """Turns per token of each pair of features of a head of an even ``width``: (width / 2,) fp64."""
    half = width // 2
    frequency = base ** (-torch.arange(half, device=device, dtype=torch.float64) / half) / (2 * math.pi)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # Llama 3.1: 0 for frequencies that turn rarely in a text of the original length, 1 for those that turn often.
    whole = frequency * scaling.original_length
    kept = ((whole - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def rotation(
    position: Tensor, width: int, base: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """position (T,) or (B, T) int64 -> cosine and sine, ([B,] T, 1, width / 2), for heads of an even ``width``; fp32,
    or fp64 if ``dtype`` is fp64.

    Turns are counted in fp64: at ten million tokens an fp32 angle is off by half a radian. The cosine and sine of the
    last turn's fraction need no more than the heads' precision.
    """
    place = position.to(torch.float64).unsqueeze(-1) * turns(width, base, scaling, position.device)
    angle = (2 * math.pi * (place - place.round())).to(torch.float64 if dtype == torch.float64 else torch.float32)
    angle = angle.unsqueeze(-2)
    return angle.cos(), angle.sin()


def rotation_from(
    first: int, like: Tensor, base: float, scaling: RopeScaling | None = None, behind: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`rotation` of tokens first, first + 1, ... for ``like`` (B, T, H, D): one for all layers of a model.

    behind: (B,) int64, what each row's positions are smaller by.
    """
    # A table of another class, such as FakeTensor, must not serve later calls.
    if torch.compiler.is_compiling() or behind is not None or type(like) is not Tensor:
        place = torch.arange(first, first + like.shape[1], device=like.device)
        place = place if behind is None else place - behind.to(like.device)[:, None]
        return rotation(place, like.shape[-1], base, like.dtype, scaling)
    return _rotation_from(
        first, like.shape[1], like.shape[-1], base, scaling, like.dtype, like.device,
        torch.is_inference_mode_enabled(), torch.cuda.current_stream(like.device) if like.is_cuda else None,
    )  # fmt: skip


@functools.lru_cache(maxsize=2)
def _rotation_from(
    first: int, length: int, width: int, base: float, scaling, dtype, device, _inference: bool, _stream: object
):
    """One table per CUDA stream: a dropped table might otherwise be overwritten while another stream reads it."""
    return rotation(torch.arange(first, first + length, device=device), width, base, dtype, scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) turned by its position (see :func:`rotation`), in x's dtype."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
