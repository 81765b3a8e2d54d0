"""States as values: what a layer or a model carries from call to call can be copied, cut off, picked from and kept."""

from typing import TypeVar

import torch
from torch import Tensor

from titans_pt.layers import state as states
from titans_pt.runs.states import load_state, save_state

__all__ = ["detach_state", "fork_state", "load_state", "move_state", "save_state", "take_rows"]

S = TypeVar("S")


def fork_state(state: S) -> S:
    """A copy that shares no tensor with ``state``: two continuations of one past. Gradients flow through it."""
    return states.fork(state)


def detach_state(state: S) -> S:
    """``state`` without the graph of the calls that made it: for truncated backpropagation."""
    return states.map_tensors(state, Tensor.detach)


def move_state(state: S, device: str | torch.device, dtype: torch.dtype | None = None) -> S:
    """``state`` for a layer on another device, or in another dtype. Gradients flow through it.

    Args:
        device: where tensors of floating point go; whole numbers (offsets, places) stay on the host, as by
            :func:`load_state`. Tensors that are there already are shared with ``state``, not copied.
        dtype: theirs from then on, such as torch.float64; None: each keeps its own.
    """
    return states.map_tensors(state, lambda tensor: states.moved(tensor, device, dtype))


def take_rows(state: S, index: Tensor) -> S:
    """The state of the rows at ``index`` (n,) int64, in that order, any of them several times. A copy."""
    return states.take_rows(state, index)
