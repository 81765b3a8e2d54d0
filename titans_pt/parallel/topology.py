"""Which rank stands where in the grid of tensor x data ranks, and the exchanges inside one tensor group."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from titans_pt.errors import UserError


class TensorGroup:
    """The ranks that share one copy of the model. One of size 1 exchanges nothing and needs no process group.

    Every exchange takes a tensor and returns one of the same dtype; all ranks of the group must call it alike.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None):
        self.rank, self.size, self.group = rank, size, group

    def all_reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
        """Element by element over ranks; the argument stays as it was."""
        if self.size == 1:
            return x
        x = x.contiguous().clone()
        dist.all_reduce(x, op, self.group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' parts side by side along ``dim``."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous(), self.group)
        return torch.cat(parts.chunk(self.size), dim)

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
    """The grid: rank = data_rank * tensor + tensor_rank, so that a tensor group lies on neighbouring ranks.

    Args:
        tensor: ranks that share one copy of the model (parallel.tensor).
        rank, world_size: of this process among all.
        patience: of an exchange, after which the backend gives up; None: the backend's own.

    Raises:
        UserError: the ranks do not divide into tensor groups.
    """

    def __init__(self, tensor: int, rank: int, world_size: int, patience: timedelta | None = None):
        check_world_size(tensor, world_size)
        self.data_rank, self.data_size = rank // tensor, world_size // tensor
        grid = torch.arange(world_size).view(self.data_size, tensor)
        # Every rank takes part in making every group.
        tensor_groups = [dist.new_group(row.tolist(), timeout=patience) for row in grid]
        data_groups = [dist.new_group(column.tolist(), timeout=patience) for column in grid.T]
        self.tensor = TensorGroup(rank % tensor, tensor, tensor_groups[self.data_rank])
        self.data_group = data_groups[self.tensor.rank]


def check_world_size(tensor: int, world_size: int):
    """
    Raises:
        UserError: the ranks do not divide into tensor groups.
    """
    if world_size % tensor:
        fits = max(n for n in range(1, tensor + 1) if world_size % n == 0)
        raise UserError(
            f"parallel.tensor: given {tensor}; must divide the number of ranks, {world_size}; set it to {fits}, or "
            f"start {-(-world_size // tensor) * tensor} processes"
        )
