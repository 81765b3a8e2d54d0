"""A cost of writing (model.memory.write_cost): it penalises writes that the task does not need."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titans_pt.layers.memory_gates import WriteGate
from titans_pt.layers.memory_observer import without_prefixes
from titans_pt.layers.recurrence import precise
from titans_pt.models.mixers.base import Mixer

Share = Callable[[Any], Tensor]
"""A module's output -> the write gate of each token, 0 to 1: the share written of what it could write."""


@contextmanager
def write_gates(model: nn.Module, collect: bool = True) -> Iterator[list[Tensor]]:
    """Collect the write gates of every mixer that runs in the ``with`` block: each (rows, ...), 0 to 1, fp32. The list
    is filled when the block ends.

    Persistent tokens are left out (:func:`without_prefixes`).

    Args:
        collect: False collects nothing and costs nothing.
    """
    gates: list[Tensor] = []
    seen: list[tuple[Share, Any]] = []

    def watch(module: nn.Module, share: Share) -> RemovableHandle:
        # Shares are computed after the with block: with activation checkpointing, an operator in this hook would belong
        # to the checkpointed layer, which is recomputed without the hook.
        return module.register_forward_hook(lambda _, given, made: seen.append((share, made)))

    hooks = [watch(*gate) for gate in _gates(model)] if collect else []
    try:
        with without_prefixes(model, seen) if collect else nullcontext():
            yield gates
    finally:
        for hook in hooks:
            hook.remove()
    gates += [share(made) for share, made in seen]


def _gates(model: nn.Module) -> Iterator[tuple[nn.Module, Share]]:
    for module in model.modules():
        if isinstance(module, WriteGate):
            yield module, precise
        elif isinstance(module, Mixer) and module.write_gate:
            yield module.get_submodule(module.write_gate), lambda made: torch.sigmoid(precise(made))


def with_write_cost(loss: Tensor, gates: list[Tensor], cost: float, rows: Tensor | None = None) -> Tensor:
    """Add the gradient of ``cost`` times the mean write gate to ``loss``, without changing its value.

    Args:
        loss: a scalar.
        gates: from :func:`write_gates`; empty if no mixer ran.
        cost: factor of the mean gate. A tensor rank sees only the gates of its own heads and passes cost / ranks.
        rows: (B,) fp32 weight of each row's gates in the mean; None: 1. Gates that belong to no row get the mean
            weight.
    """
    if not gates or not cost:
        return loss
    total: Any  # a tensor, since there are gates
    if rows is None:
        total = sum(gate.sum() for gate in gates)
    else:
        total = sum((gate.flatten(1).sum(1) * _spread(rows, len(gate))).sum() for gate in gates)
    term = cost * total / sum(gate.numel() for gate in gates)
    return loss + (term - term.detach())


def _spread(rows: Tensor, count: int) -> Tensor:
    """Repeat the weights of rows for ``count`` rows of gates, where segments of one row stand next to each other."""
    if count % len(rows):
        return rows.mean()
    return torch.repeat_interleave(rows, count // len(rows))
