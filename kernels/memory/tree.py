"""Functions over nested dataclasses and lists of tensors, such as the operands of a memory block.

titans_pt.layers.state does this for states carried between calls, but kernels do not import layers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def leaves(x: Any) -> list[Tensor]:
    """The tensors in ``x``, which is a tensor, None, or a list, tuple or dataclass of these."""
    if isinstance(x, Tensor):
        return [x]
    return [leaf for part in _parts(x) for leaf in leaves(part)]


def rebuilt(x: Any, tensors: Iterator[Tensor]) -> Any:
    """Copy of ``x`` with other tensors, in the order of :func:`leaves`."""
    if isinstance(x, Tensor):
        return next(tensors)
    if x is None:
        return None
    parts = [rebuilt(part, tensors) for part in _parts(x)]
    return type(x)(parts) if isinstance(x, list | tuple) else type(x)(*parts)


def _parts(x: Any) -> Iterable:
    return () if x is None else [getattr(x, f.name) for f in fields(x)] if is_dataclass(x) else x


def each(x: Any, count: int) -> list:
    """Split ``x`` with tensors (count N, ...) into ``count`` copies with tensors (N, ...)."""
    if count == 1:
        return [x]
    parts = [leaf.unflatten(0, (count, -1)).unbind() for leaf in leaves(x)]
    return [rebuilt(x, iter([part[i] for part in parts])) for i in range(count)]


def joined(each: list) -> Any:
    """Reverse of :func:`each`."""
    if len(each) == 1:
        return each[0]
    return rebuilt(each[0], (torch.cat(parts) for parts in zip(*map(leaves, each), strict=True)))
