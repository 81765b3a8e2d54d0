"""What a model carries from one call to the next, as nested dataclasses of tensors."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def map_tensors(state: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``state`` with ``fn`` applied to every tensor; dataclasses, tuples, lists and None keep their shape.

    ``map_tensors(state, torch.clone)`` forks a state, ``torch.Tensor.detach`` cuts its history.
    """
    if isinstance(state, torch.Tensor):
        return fn(state)
    if is_dataclass(state):
        return replace(state, **{f.name: map_tensors(getattr(state, f.name), fn) for f in fields(state)})
    if isinstance(state, (tuple, list)):
        return type(state)(map_tensors(item, fn) for item in state)
    return state


def state_bytes(state: Any) -> int:
    """Bytes that the tensors of ``state`` hold."""
    total = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_tensors(state, count)
    return total
