"""Operations on the states of layers and models: copy, detach, move, select and join rows, save and load."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from titans_pt.errors import UserError
from titans_pt.layers import state as inner
from titans_pt.library.titan import Reading
from titans_pt.runs.states import load_state, save_state

__all__ = ["detach_state", "fork_state", "join_rows", "load_state", "move_state", "save_state", "take_rows"]

S = TypeVar("S")


def fork_state(state: S) -> S:
    """A copy that shares no tensor with ``state``, for a second continuation. Gradients flow through it."""
    return inner.fork(_checked(state))


def detach_state(state: S) -> S:
    """``state`` without the graph of the calls that made it: for truncated backpropagation."""
    return inner.map_tensors(_checked(state), Tensor.detach)


def move_state(state: S, device: str | torch.device, dtype: torch.dtype | None = None) -> S:
    """``state`` for a layer on another device, or in another dtype. Gradients flow through it.

    Args:
        device: target of floating-point tensors. Integer tensors (offsets, positions) are moved to the host, as in
            :func:`load_state`. Tensors already on the target are shared with ``state``, not copied.
        dtype: new dtype of floating-point tensors, such as torch.float64; None: each keeps its own.

    Raises:
        UserError: ``dtype`` has no fractions.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"dtype: given {dtype}; allowed: a floating-point type, such as torch.float32")
    return inner.map_tensors(_checked(state), lambda tensor: inner.moved(tensor, device, dtype))


def take_rows(state: S, index: Tensor | Sequence[int]) -> S:
    """A copy of the state for the rows at ``index`` (n,) integers, in that order; a row may repeat.

    Raises:
        UserError: ``index`` is no vector of integers, or names a row that the state does not have (on a GPU
            PyTorch reports this itself).
    """
    index = torch.as_tensor(index)
    if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise UserError(f"index: given {index.dtype} of shape {tuple(index.shape)}; allowed: integers (n,), the rows' "
                        "numbers (of a mask: mask.nonzero()[:, 0])")  # fmt: skip
    try:
        return inner.take_rows(_checked(state), index.long())
    except IndexError:
        raise UserError(f"index: given {index.tolist()}; the state has no such row") from None


def join_rows(states: Sequence[S]) -> S:
    """One state of the rows of all ``states``, in order; a copy. Gradients flow through it.

    The streams may have read unequally many tokens, and be in different places of their chunks, segments and documents.
    Full attention fills the shorter streams' cache up with unused entries, which leave with the longest stream.

    Raises:
        UserError: no state, or states of different layers, weights, devices or dtypes.
    """
    return inner.join_rows([_checked(state) for state in states])


def _checked(state: S) -> S:
    """The state itself.

    Raises:
        UserError: it is a whole Reading.
    """
    if isinstance(state, Reading):
        raise UserError("state: given a Reading, which holds one beside other things; pass reading.state")
    return state
