"""The grid of ranks, and the exchanges inside one of its groups."""

import math
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titans_pt.errors import UserError

T = TypeVar("T")


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
    """The grid of ranks, data x context x tensor, and this process's place in it.

    Rank r has the coordinates of r in a row-major array of shape (data, context, tensor): with data = 2 and tensor = 2,
    ranks 0 and 1 share a model, ranks 0 and 2 share its gradients. Ranks that share a model are neighbours, best kept
    inside one node.

    Args:
        tensor, context: sizes of these axes; data has size ``world_size`` over their product.
        rank: rank of this process. world_size: number of all processes.
        patience: timeout of an exchange; None: the backend's own.

    Attributes:
        data: ranks with the same part of the model and other samples.
        context: ranks with the same part of the model and other pieces of the same samples, in the order of time.
        tensor: ranks that share one copy of the model and its samples' pieces.
        replicas: the ranks with the same part of the model, along data and context: gradients are summed over them.
        host_context: the ranks of the context group on gloo, whatever the backend; None if the group has one rank.

    Raises:
        UserError: the ranks do not divide into models.
    """

    def __init__(self, tensor: int, context: int, rank: int, world_size: int, patience: timedelta | None = None):
        shape = data_ranks(tensor, context, world_size), context, tensor
        grid = torch.arange(world_size).view(shape)
        place = [int(n) for n in torch.unravel_index(torch.tensor(rank), shape)]

        def along(axis: int) -> RankGroup:
            lines = grid.movedim(axis, -1).reshape(-1, shape[axis])
            return RankGroup(place[axis], shape[axis], _own_group(lines, rank, patience))

        self.data, self.context, self.tensor = along(0), along(1), along(2)
        replicas = _own_group(grid.view(-1, tensor).T, rank, patience)
        self.replicas = RankGroup(place[0] * context + place[1], shape[0] * context, replicas)
        self.host_context = None
        if context > 1:
            self.host_context = _own_group(grid.movedim(1, -1).reshape(-1, context), rank, patience, "gloo")

    def __str__(self) -> str:
        return grid_text(self.data.size, self.context.size, self.tensor.size)


def _own_group(lines: Tensor, rank: int, patience: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """The process group of the line of ranks, one of ``lines``, that contains ``rank``. All ranks must take part in
    making all groups."""
    made = [(line, dist.new_group(line, timeout=patience, backend=backend)) for line in lines.tolist()]
    return next(group for line, group in made if rank in line)


def data_ranks(tensor: int, context: int, world_size: int) -> int:
    """Number of data ranks: ``world_size`` over the sizes of the other axes.

    Raises:
        UserError: the ranks do not divide into models.
    """
    for name, size, others in (("tensor", tensor, 1), ("context", context, tensor)):
        if world_size % (others * size):
            fits = math.gcd(size, world_size // others)  # divides heads and data.seq_len, which ``size`` divides
            beside = "" if others == 1 else f" / parallel.tensor={others}"
            raise UserError(
                f"parallel.{name}: given {size}; must divide the number of ranks, {world_size}{beside}; set it to "
                f"{fits}, or start {-(-world_size // (others * size)) * others * size} processes"
            )
    return world_size // (tensor * context)


def grid_text(data: int, context: int, tensor: int) -> str:
    """The grid in words, such as "2 tensor x 4 data"; context only if sequences are cut."""
    return f"{tensor} tensor x {f'{context} context x ' if context > 1 else ''}{data} data"
