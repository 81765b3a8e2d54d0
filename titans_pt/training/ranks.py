"""The processes of a run: one, or the several that torchrun (or anything that sets its variables) started."""

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from titans_pt.errors import UserError

T = TypeVar("T")


class Ranks:
    """This process among its peers: ``rank`` of ``world_size``, on ``device``. patience: of its exchanges."""

    def __init__(self, device: torch.device, patience: timedelta):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device, self.patience = device, patience

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs ``action`` on rank 0 alone; every rank gets its result, or raises its exception.

        So all ranks fail together, and none waits for one that has stopped.
        """
        answer: list = [None, None]
        failure = None
        if self.first:
            try:
                answer[0] = action()
            except Exception as error:
                if self.world_size == 1:
                    raise
                plain = isinstance(error, (UserError, OSError))  # other errors may not survive pickling
                answer[1] = error if plain else RuntimeError(f"rank 0 failed: {error!r}")
                failure = error
        if self.world_size > 1:
            dist.broadcast_object_list(answer, src=0, device=self.device)
        if answer[1] is not None:
            raise failure or answer[1]
        return answer[0]

    def together(self, action: Callable[[], None]):
        """Runs ``action`` on every rank; if it fails on any, all raise: their own exception, or that of the lowest rank
        that failed."""
        own, failures = None, [None] * self.world_size
        try:
            action()
        except Exception as error:
            own = error
        if self.world_size > 1:
            plain = own is None or isinstance(own, (UserError, OSError))
            dist.all_gather_object(failures, own if plain else RuntimeError(f"rank {self.rank} failed: {own!r}"))
        if failure := own or next((failure for failure in failures if failure is not None), None):
            raise failure

    def sum(self, values: list[float]) -> list[float]:
        """Sums of each entry over ranks, in float64."""
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(vector)
        return vector.tolist()

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of every rank, by rank, in float64; as many from each."""
        if self.world_size == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own)
        return [each.tolist() for each in found]


@contextmanager
def process_group(timeout: float = 600.0):
    """Joins the process group (gloo on CPU, NCCL on GPUs) and yields :class:`Ranks`; leaves it at the end.

    Without torchrun's variables in the environment it is a group of one, which needs no port.

    Args:
        timeout: seconds; train.timeout. The backend's own, 600 s with NCCL, would end a process without saying where
            the others stand: it waits ten times as long, so that the :class:`~titans_pt.training.watchdog.Watchdog` is
            first.

    Raises:
        UserError: several processes were started without a place to meet.
    """
    rendezvous, world_size = "MASTER_ADDR" in os.environ, os.environ.get("WORLD_SIZE", "1")
    if world_size != "1" and not rendezvous:
        raise UserError(
            f"WORLD_SIZE={world_size} is set, but MASTER_ADDR is not; start with torchrun --nproc_per_node N"
        )
    device = _device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=10 * timeout)
    if rendezvous:
        dist.init_process_group(backend, timeout=patience)
        yield Ranks(device, patience)
        # Only after success: a rank that fails must not wait here for others that wait for it. Together, since one that
        # closes its connections early may cut off another that still reads from them.
        dist.barrier(device_ids=None if device.index is None else [device.index])
        dist.destroy_process_group()
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed reads these
    added = alone.keys() - os.environ.keys()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=patience
        )
        os.environ.update(alone | os.environ)
        try:
            yield Ranks(device, patience)
        finally:
            dist.destroy_process_group()
            for name in added:
                os.environ.pop(name, None)


def _device(local_rank: int) -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise UserError(f"process {local_rank + 1} of this machine has no GPU: there are {count}; "
                        f"start with torchrun --nproc_per_node {count}")  # fmt: skip
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
