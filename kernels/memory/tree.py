"""Dataclasses and lists of tensors, as one: operands of the memory's block. Kernels import no layers, whose
titans_pt.layers.state walks what is carried between calls."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def leaves(x: Any) -> list[Tensor]:
    """The tensors in ``x``: a tensor, None, or a list, tuple or dataclass of such."""
    if isinstance(x, Tensor):
        return [x]
    return [leaf for part in _parts(x) for leaf in leaves(part)]


def rebuilt(x: Any, tensors: Iterator[Tensor]) -> Any:
    """``x`` with other tensors, in the order of :func:`leaves`."""
    if isinstance(x, Tensor):
        return next(tensors)
    parts = [rebuilt(part, tensors) for part in _parts(x)]
    return type(x)(*parts) if is_dataclass(x) else None if x is None else parts


def _parts(x: Any) -> Iterable:
    return () if x is None else [getattr(x, f.name) for f in fields(x)] if is_dataclass(x) else x


def each(x: Any, count: int) -> list:
    """Tensors (count N, ...) -> ``count`` times the same with (N, ...)."""
    if count == 1:
        return [x]
    parts = [leaf.unflatten(0, (count, -1)).unbind() for leaf in leaves(x)]
    return [rebuilt(x, iter([part[i] for part in parts])) for i in range(count)]


def joined(each: list, dim: int = 0) -> Any:
    """The reverse; or along another dimension."""
    if len(each) == 1:
        return each[0]
    return rebuilt(each[0], (torch.cat(parts, dim) for parts in zip(*map(leaves, each), strict=True)))
