"""State that a mixer or a whole model carries from one call to the next: tensors in dataclasses, tuples, lists, dicts.

Everything that walks a state uses :func:`parts` and :func:`with_parts`. torch.utils._pytree would need every state
class to be registered, also for mixers outside this repository.
"""

import copy
import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

SHARED = {"shared": True}
"""Metadata of a dataclass field whose tensor has no row dimension: all rows share it."""


PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type)
"""Types of leaves that hold no tensor."""


def parts(state: Any) -> list[tuple[str, Any]]:
    """(name, value) of each field of a dataclass, of each item of a tuple, list or dict; a leaf has none."""
    if is_dataclass(state) and not isinstance(state, type):
        return [(f.name, getattr(state, f.name)) for f in fields(state)]
    if isinstance(state, (tuple, list)):
        return [(str(n), item) for n, item in enumerate(state)]
    if isinstance(state, dict):
        return [(str(key), item) for key, item in state.items()]
    return []


def with_parts(state: Any, values: Iterable[Any]) -> Any:
    """``state`` with other values of its :func:`parts`.

    Raises:
        TypeError: ``state`` is a leaf of a type that may hold tensors, which the functions here would miss.
    """
    if not parts(state):
        if not isinstance(state, (torch.Tensor, *PLAIN, tuple, list, dict)) and not is_dataclass(state):
            raise TypeError(f"state: holds a {type(state).__qualname__}; a state is made of tensors and plain values "
                            "in dataclasses, tuples, lists and dicts")  # fmt: skip
        return state
    if is_dataclass(state):
        return replace(state, **{f.name: value for f, value in zip(fields(state), values, strict=True)})
    if isinstance(state, dict):
        other = copy.copy(state)  # a defaultdict or OrderedDict stays one
        other.update(zip(state, values, strict=True))
        return other
    return state._make(values) if hasattr(state, "_make") else type(state)(values)  # a named tuple


def find(state: Any, kind: type) -> Iterator[Any]:
    """Every instance of ``kind`` in ``state``, in order."""
    if isinstance(state, kind):
        yield state
    else:
        for _, part in parts(state):
            yield from find(part, kind)


def map_tensors(state: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``state`` with ``fn`` applied to every tensor; dataclasses, tuples, lists, dicts and None keep their shape.

    For example, ``map_tensors(state, torch.Tensor.detach)`` detaches it from autograd's graph.
    """
    if isinstance(state, torch.Tensor):
        return fn(state)
    return with_parts(state, [map_tensors(part, fn) for _, part in parts(state)])


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor of ``state``, in order."""
    return find(state, torch.Tensor)


def rows(state: Any) -> int | None:
    """Number of rows of ``state``: the first dimension of its first tensor. None without a tensor."""
    first = next(tensors(state), None)
    return None if first is None else len(first)


def check_rows(given: int | None, x: torch.Tensor):
    """
    Raises:
        ValueError: a state of ``given`` rows (None: there is no state) for an x (B, ...) of another number.
    """
    if given not in (None, len(x)):
        raise ValueError(f"state: given one of {given} rows; the input has {len(x)}")


def take_rows(state: Any, index: torch.Tensor) -> Any:
    """Copy of the rows at ``index`` (n,) int64, in that order; a row may repeat. Gradients flow through it.

    It serves beam search, and several continuations of each row. A dataclass whose rows are not the first dimension of
    its tensors has a method of this name. A tensor that all rows share is a field with ``SHARED`` as its metadata.
    """
    if isinstance(state, torch.Tensor):
        return state.index_select(0, index.to(state.device))
    if hasattr(state, "take_rows"):
        return state.take_rows(index)
    shared = {f.name for f in fields(state) if f.metadata.get("shared")} if is_dataclass(state) else ()
    return with_parts(state, [fork(part) if name in shared else take_rows(part, index) for name, part in parts(state)])


def fork(state: Any) -> Any:
    """A copy that shares no tensor with ``state``: two continuations of one past. Gradients flow through it."""
    return map_tensors(state, torch.clone)


def moved(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A state's tensor, moved to ``device`` and ``dtype`` (None: its own) if it is of floating point. Integer tensors
    (offsets, places) stay on the host, where mixers compute masks and cuts from them."""
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor


def compact(state: Any) -> Any:
    """``state`` with copies of tensors that would keep much unused memory alive.

    A tensor is copied if all tensors of ``state`` together use less than half of its storage. The last tokens of a
    long call are such a view: it keeps the tensor of the whole call alive.
    """
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors(state))):
        return state  # torch.func's tensors have no storage
    used: dict[int, int] = {}
    for tensor in tensors(state):
        place = tensor.untyped_storage()._cdata
        used[place] = used.get(place, 0) + tensor.numel() * tensor.element_size()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        return tensor.clone() if 2 * used[storage._cdata] < storage.nbytes() else tensor

    return map_tensors(state, own)


def state_bytes(state: Any) -> int:
    """Bytes that the tensors of ``state`` hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(state))
