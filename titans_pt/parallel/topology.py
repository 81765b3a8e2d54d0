"""The grid of ranks, and the exchanges inside one of its groups."""

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titans_pt.errors import UserError

T = TypeVar("T")
AXES = ("data", "context", "tensor")
"""The grid's axes, outermost first: ranks that differ only in the last are neighbours, best kept inside one node."""


class RankGroup:
    """The ranks along one axis of the grid. A group of size 1 exchanges nothing and needs no process group.

    Every exchange takes a tensor and returns one of the same dtype; all ranks of the group must make the same call.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None):
        self.rank, self.size, self.group = rank, size, group

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduction over ranks, element by element; the argument is not changed."""
        if self.size == 1:
            return x
        x = x.contiguous().clone()
        dist.all_reduce(x, op, self.group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' parts, concatenated along ``dim``."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous(), self.group)
        return torch.cat(parts.chunk(self.size), dim)

    def gather_objects(self, value: T) -> list[T]:
        """The ranks' values, which pickle can copy."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole along ``dim``: a view."""
        return x.chunk(self.size, dim)[self.rank]

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along ``dim``, of the sum over ranks."""
        if self.size == 1:
            return x
        parts = torch.cat(x.chunk(self.size, dim))
        mine = parts.new_empty(parts.shape[0] // self.size, *parts.shape[1:])
        dist.reduce_scatter_tensor(mine, parts, group=self.group)
        return mine


class Topology:
    """The grid of ranks with an axis for each kind of parallelism, and this process's place in it.

    Rank r has the coordinates of r in a row-major array of shape (size of each of AXES): with data = 2 and
    tensor = 2, ranks 0 and 1 share a model, ranks 0 and 2 share its gradients.

    Args:
        sizes: size of each axis by name. ``data`` is ``world_size`` over the product of the others; a missing axis has
            size 1.
        rank: rank of this process. world_size: number of all processes.
        patience: timeout of an exchange; None: the backend's own.

    Attributes:
        groups: axis -> the ranks that differ from this one only along this axis.
        replicas: the ranks with the same part of the model, along data and context: gradients are summed over them.
        host_context: the ranks of the context group on gloo, whatever the backend; None if the group has one rank.

    Raises:
        UserError: the ranks do not divide into models.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int, world_size: int, patience: timedelta | None = None):
        shape = grid_shape(sizes, world_size)
        grid = torch.arange(world_size).view(shape)
        place = torch.unravel_index(torch.tensor(rank), shape)
        self.groups: dict[str, RankGroup] = {}
        for n, axis in enumerate(AXES):
            lines = grid.movedim(n, -1).reshape(-1, shape[n])
            self.groups[axis] = RankGroup(int(place[n]), shape[n], _own_group(lines, rank, patience))
        data, context, tensor = shape
        replicas = _own_group(grid.view(-1, tensor).T, rank, patience)
        self.replicas = RankGroup(int(place[0]) * context + int(place[1]), data * context, replicas)
        self.host_context = None
        if context > 1:
            self.host_context = _own_group(grid.movedim(1, -1).reshape(-1, context), rank, patience, "gloo")

    def __str__(self) -> str:
        return grid_text(*(self.groups[axis].size for axis in AXES))

    @property
    def data(self) -> RankGroup:
        """Ranks with the same part of the model and other samples."""
        return self.groups["data"]

    @property
    def context(self) -> RankGroup:
        """Ranks with the same part of the model and other pieces of the same samples, in the order of time."""
        return self.groups["context"]

    @property
    def tensor(self) -> RankGroup:
        """Ranks that share one copy of the model and its samples' pieces."""
        return self.groups["tensor"]


def _own_group(lines: Tensor, rank: int, patience: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """The process group of the line of ranks, one of ``lines``, that contains ``rank``. All ranks must take part in
    making all groups."""
    made = [(line, dist.new_group(line, timeout=patience, backend=backend)) for line in lines.tolist()]
    return next(group for line, group in made if rank in line)


def grid_shape(sizes: Mapping[str, int], world_size: int) -> tuple[int, ...]:
    """The size of each of AXES.

    Raises:
        UserError: the ranks do not divide into models.
    """
    tensor, context = sizes["tensor"], sizes.get("context", 1)
    for name, size, others in (("tensor", tensor, 1), ("context", context, tensor)):
        if world_size % (others * size):
            fits = math.gcd(size, world_size // others)  # divides heads and data.seq_len, which ``size`` divides
            beside = "" if others == 1 else f" / parallel.tensor={others}"
            raise UserError(
                f"parallel.{name}: given {size}; must divide the number of ranks, {world_size}{beside}; set it to "
                f"{fits}, or start {-(-world_size // (others * size)) * others * size} processes"
            )
    return world_size // (tensor * context), context, tensor


def grid_text(data: int, context: int, tensor: int) -> str:
    """The grid in words, such as "2 tensor x 4 data"; context only if sequences are cut."""
    return f"{tensor} tensor x {f'{context} context x ' if context > 1 else ''}{data} data"
