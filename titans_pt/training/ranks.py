"""The processes of a run: one, or several that torchrun (or another launcher with its variables) started."""

import os
import resource
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titans_pt.errors import UserError
from titans_pt.parallel.topology import RankGroup
from titans_pt.tools.processes import Place, number, place
from titans_pt.training.background import within

T = TypeVar("T")
JOINING = 300.0
"""Least seconds that a process waits for the other processes of its job to start."""
PATIENCE = timedelta(days=7)
"""Longest time that an exchange between ranks may take.

The backends' own timeouts would end a process without saying where the other ranks are, and would end a suspended job
as soon as it continues.
"""


class Ranks:
    """This process among its peers: ``rank`` of ``world_size``, on ``device``. patience: timeout of exchanges."""

    def __init__(self, device: torch.device, patience: timedelta):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device, self.patience = device, patience

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs ``action`` on rank 0 alone; every rank gets its result, or raises its exception.

        All ranks then fail together, and none waits for one that has stopped.
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
        """Runs ``action`` on every rank; if it fails on any rank, all ranks raise.

        Each rank raises its own exception, or else the exception of the lowest rank that failed.
        """
        own: Exception | None = None
        try:
            action()
        except Exception as error:
            own = error
        plain = own is None or isinstance(own, (UserError, OSError))
        failures = self.gather_objects(own if plain else RuntimeError(f"rank {self.rank} failed: {own!r}"))
        if failure := own or next((failure for failure in failures if failure is not None), None):
            raise failure

    def broadcast(self, x: Tensor):
        """Overwrites ``x``, on any device, by rank 0's values; every rank gives the same shape and dtype."""
        if self.world_size > 1:
            whole = x.to(self.device)
            dist.broadcast(whole, 0)
            x.copy_(whole)

    def sum(self, values: list[float]) -> list[float]:
        """Sums of each entry over ranks, in float64."""
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(vector)
        return vector.tolist()

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of every rank, by rank, in float64; each rank gives the same number of values."""
        if self.world_size == 1:
            return [values]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own)
        return [each.tolist() for each in found]

    def gather_objects(self, value: T) -> list[T]:
        """The value of every rank, by rank; any object that can be pickled."""
        return RankGroup(self.rank, self.world_size).gather_objects(value)


@contextmanager
def process_group(timeout: float = 600.0):
    """Joins the process group (gloo on CPU, NCCL on GPUs) and yields :class:`Ranks`; leaves the group at the end.

    A single process forms a group without a port, whatever the environment says about other machines.

    Args:
        timeout: seconds; train.timeout. Processes wait this long for each other to start, at least JOINING. Later the
            :class:`~titans_pt.training.watchdog.Watchdog` ends a run that hangs, and says where each rank is.

    Raises:
        UserError: torchrun's variables contradict each other, or the processes cannot connect.
    """
    mine = place()
    device = _device(mine.local_rank or 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if mine.size > 1:
        _join(backend, mine, timedelta(seconds=max(timeout, JOINING)))
        yield Ranks(device, PATIENCE)
        # Only after success: a rank that fails must not wait here for others that wait for it. With a barrier, since a
        # rank that closes its connections early may cut off another that still reads from them.
        dist.barrier(device_ids=None if device.index is None else [device.index])
        dist.destroy_process_group()
        return
    alone = {"RANK": "0", "LOCAL_RANK": str(mine.local_rank or 0), "WORLD_SIZE": "1"}  # DeepSpeed reads these
    before = {name: os.environ.get(name) for name in alone}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1, timeout=PATIENCE
        )
        os.environ.update(alone)
        try:
            yield Ranks(device, PATIENCE)
        finally:
            dist.destroy_process_group()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _join(backend: str, mine: Place, patience: timedelta):
    """Joins the others of the job at MASTER_ADDR and MASTER_PORT.

    Raises:
        UserError: these are missing or wrong, nothing answers there, or another program does.
    """
    address, text = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address:
        raise UserError(f"WORLD_SIZE={mine.size} is set, but MASTER_ADDR is not; start with torchrun --nproc_per_node "
                        "N, or unset WORLD_SIZE to start only one process")  # fmt: skip
    if not 0 < (number(text) or 0) < 65536:
        raise UserError(f"MASTER_PORT: given {text!r}; must be a port of {address}, from 1 to 65535")
    # Rank 0's store keeps two connections open for each rank: the usual soft limit of 1,024 files ends at 512 ranks.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        # Alone, torch would wait forever for another program that listens there silently.
        seconds = patience.total_seconds() + 10
        store, *_ = within(seconds, lambda: next(dist.rendezvous("env://", mine.rank, mine.size, timeout=patience)))
    except (dist.DistError, TimeoutError) as error:
        taken = "EADDRINUSE" in str(error)
        if taken and "TORCHELASTIC_RUN_ID" in os.environ:
            raise  # torchrun chose the port, and chooses another when it restarts the processes
        why = "the port is in use, by another job perhaps" if taken else str(error).partition("\n")[0].rstrip(".")
        why = why or "what listens on this port does not answer"  # the TimeoutError of ``within`` says nothing
        raise UserError(
            f"MASTER_ADDR={address} MASTER_PORT={text}: rank {mine.rank} of {mine.size} cannot "
            f"connect to the other ranks: "
            f"{why}; give all ranks of the job the address of rank 0's machine and the same free port on it"
        ) from None
    dist.init_process_group(backend, store=store, rank=mine.rank, world_size=mine.size, timeout=PATIENCE)


def _device(local_rank: int) -> torch.device:
    """The GPU of this process, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise UserError(f"process {local_rank + 1} of this machine has no GPU: there are {count}; "
                        f"start with torchrun --nproc_per_node {count}")  # fmt: skip
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
