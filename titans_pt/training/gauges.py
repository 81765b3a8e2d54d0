"""Gauges that an operator watches beside the loss: slow ranks, lost time, memory, speed per device."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from statistics import median
from typing import Any

import torch

from titans_pt.training.ranks import Ranks

OWN = ("data", "forward")
"""Parts of a step in which a rank waits for no data-parallel peer (ZeRO 1 and 2). In the other parts all ranks are as
slow as the slowest."""


class Gauges:
    """Collects this rank's figures between two logged steps; :meth:`read` combines them over all ranks."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._losses: list[float] = []
        self._lost: dict[str, float] = {}
        self._doing: str | None = None
        self._since = 0.0

    def step(self, loss: float):
        """Adds the loss of a step, the mean over all ranks."""
        self._losses.append(loss)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Counts the time spent in the ``with`` as lost to ``what``; nested calls count for the innermost only."""
        before = self._turn(what)
        try:
            yield
        finally:
            self._turn(before)

    def _turn(self, what: str | None) -> str | None:
        before, now = self._doing, time.perf_counter()
        if before:
            self._lost[before] = self._lost.get(before, 0.0) + now - self._since
        self._doing, self._since = what, now
        return before

    def read(self, seconds: dict[str, float], speed: float) -> dict[str, Any]:
        """The figures since the last call, for a record of metrics.jsonl. Collective: every rank calls it.

        Args:
            seconds: seconds that this rank spent in each part of this step, by name.
            speed: tokens per second of all ranks.

        Returns:
            loss_mean: mean over the steps; slowest_rank, slowest_rank_seconds, median_rank_seconds: time in the OWN
            parts of this step; tokens_per_second_per_device; lost_to_WHAT_seconds; gpu_memory_gib: the highest peak of
            any rank, None without a GPU.
        """
        own = [sum(seconds.get(part, 0.0) for part in OWN), self._peak_memory()]
        spent, peaks = zip(*self.ranks.gather(own), strict=True)
        slowest = max(range(len(spent)), key=spent.__getitem__)
        losses, self._losses = self._losses, []
        lost, self._lost = self._lost, {}
        return {
            "loss_mean": sum(losses) / len(losses) if losses else None,
            "slowest_rank": slowest,
            "slowest_rank_seconds": spent[slowest],
            "median_rank_seconds": median(spent),
            "tokens_per_second_per_device": speed / self.ranks.world_size,
            "gpu_memory_gib": max(peaks) / 2**30 if self.ranks.device.type == "cuda" else None,
            **{f"lost_to_{what}_seconds": lost.get(what, 0.0) for what in ("checkpoint", "validation", "evaluation")},
        }

    def _peak_memory(self) -> float:
        """Peak GPU memory in bytes since the last call."""
        if self.ranks.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.ranks.device)
        torch.cuda.reset_peak_memory_stats(self.ranks.device)
        return float(peak)


def lost_to(what: str) -> Callable[[Callable], Callable]:
    """Decorates a method of an object with ``gauges``: the method's time counts as lost to ``what``."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def timed(self, *args, **named):
            with self.gauges.during(what):
                return method(self, *args, **named)

        return timed

    return decorate
