"""Samples to batches of tensors, read ahead while the model computes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from titans_pt.errors import UserError


class Loader:
    """One rank's part of each global batch; the batches do not depend on how many ranks there are.

    Args:
        samples: ``sample(position)`` gives a tuple of arrays, ``seq_len`` steps long.
        micro_batch: B, samples that a rank puts through the model at once.
        rank, world_size: of the data-parallel group.
        batch_samples: samples of one optimiser step, all ranks together.

    Raises:
        UserError: batch_samples does not divide into micro-batches of all ranks.
    """

    def __init__(self, samples: Any, micro_batch: int, rank: int, world_size: int, batch_samples: int):
        if batch_samples % (micro_batch * world_size):
            raise UserError(_indivisible(batch_samples, micro_batch, world_size, samples.seq_len))
        self.samples, self.micro_batch, self.rank = samples, micro_batch, rank
        self.world_size, self.batch_samples = world_size, batch_samples
        self.micro_steps = batch_samples // (micro_batch * world_size)
        self._pin = torch.cuda.is_available()
        self._pool = ThreadPoolExecutor(1, "loader")
        self._ahead: tuple[int, Future] | None = None

    def batches(self, consumed: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields this rank's ``micro_steps`` parts of the global batch at positions consumed + [0, batch_samples).

        Yields:
            the samples' arrays, stacked. On the CPU, in pinned memory if there is a GPU.
        """
        ahead, self._ahead = self._ahead, None
        batch = ahead[1].result() if ahead and ahead[0] == consumed else self._load(consumed)
        following = consumed + self.batch_samples  # what training asks for next; read while it computes
        self._ahead = (following, self._pool.submit(self._load, following))
        yield from batch

    def positions(self, consumed: int, micro_step: int) -> range:
        """Positions of the B samples of this rank's ``micro_step``-th part of the batch at ``consumed``."""
        start = consumed + (micro_step * self.world_size + self.rank) * self.micro_batch
        return range(start, start + self.micro_batch)

    def _load(self, consumed: int) -> list[tuple[torch.Tensor, ...]]:
        return [self._collate(self.positions(consumed, step)) for step in range(self.micro_steps)]

    def _collate(self, positions: range) -> tuple[torch.Tensor, ...]:
        tensors = collate([self.samples.sample(position) for position in positions])
        return tuple(tensor.pin_memory() for tensor in tensors) if self._pin else tensors


def collate(samples: Sequence[tuple[np.ndarray, ...]]) -> tuple[torch.Tensor, ...]:
    """Stacks the samples' first arrays, their second arrays, and so on."""
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True))


def _indivisible(batch_samples: int, micro_batch: int, world_size: int, seq_len: int) -> str:
    """Remedy for a batch that does not divide: a smaller micro-batch if one divides it, or another batch."""
    together = micro_batch * world_size
    remedy = f"set train.batch_tokens={-(-batch_samples // together) * together * seq_len}"
    share, rest = divmod(batch_samples, world_size)
    if not rest:
        fits = max(b for b in range(1, min(micro_batch, share) + 1) if share % b == 0)
        remedy = f"set train.micro_batch={fits}, or {remedy}"
    return (
        f"train.batch_tokens={batch_samples * seq_len}: its {batch_samples} samples of {seq_len} tokens do not "
        f"divide into train.micro_batch={micro_batch} on each of {world_size} ranks; {remedy}"
    )
