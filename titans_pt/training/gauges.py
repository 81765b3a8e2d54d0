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
"""Parts of a step in which a rank waits for no data-parallel peer (ZeRO 1 and 2): in the others all are as slow as the
slowest."""


class Gauges:
    """Collects figures between two logged steps, of this rank and, in :meth:`read`, of all."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._losses: list[float] = []
        self._lost: dict[str, float] = {}
        self._doing: str | None = None
        self._since = 0.0

    def step(self, loss: float):
        """Counts the loss of a step, as all ranks know it."""
        self._losses.append(loss)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """The time spent inside is lost to ``what``; what is inside of it belongs to the inner one alone."""
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
            seconds: of the parts of this step on this rank, by name.
            speed: tokens per second of all ranks.

        Returns:
            loss_mean: over the steps; slowest_rank, slowest_rank_seconds, median_rank_seconds: of OWN parts of this
            step; tokens_per_second_per_device; lost_to_WHAT_seconds; gpu_memory_gib: the peak of the rank that used
            most, None without a GPU.
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
        """Bytes; the next peak counts from here."""
        if self.ranks.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.ranks.device)
        torch.cuda.reset_peak_memory_stats(self.ranks.device)
        return float(peak)


def lost_to(what: str) -> Callable[[Callable], Callable]:
    """Decorates a method of an object with ``gauges``: its time is lost to ``what``."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def timed(self, *args, **named):
            with self.gauges.during(what):
                return method(self, *args, **named)

        return timed

    return decorate
