"""One measured number with its uncertainty, and how those of several seeds become one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titans_pt.tools.statistics import half_width, wilson


@dataclass(frozen=True)
class Figure:
    """One figure. ``value``: a share of right answers (accuracy), nats per token (perplexity), or any number.

    ``n``: number of questions or tokens that it was measured on. ``stderr``: of the nats, over so many ``streams`` of
    text. ``by_stream``: the nats of each stream, in the order of the text; empty where they were not kept.
    """

    kind: Literal["accuracy", "perplexity", "number"]
    value: float
    n: int
    stderr: float | None = None
    streams: int = 0
    by_stream: tuple[float, ...] = ()

    @property
    def shown(self) -> float:
        """Value in a table's unit: accuracies in percent, a perplexity as such."""
        return {"accuracy": 100 * self.value, "perplexity": _exp(self.value)}.get(self.kind, self.value)


@dataclass(frozen=True)
class Pooled:
    """The mean over seeds, as shown; ``interval`` of 95 % that comes from the samples of the evaluation, not from the
    seeds; each seed's own value beside it. ``by_stream``: means over the seeds that have them."""

    mean: float
    n: int
    interval: tuple[float, float] | None
    by_seed: dict[int, float]
    by_stream: tuple[float, ...] = ()


def pool(found: dict[int, Figure]) -> Pooled:
    """Figures of one kind for each seed. Means of perplexities are taken in nats; accuracies pool all seeds'
    questions."""
    figures = list(found.values())
    mean = Figure(figures[0].kind, math.fsum(f.value for f in figures) / len(figures), sum(f.n for f in figures))
    by_seed = {seed: figure.shown for seed, figure in found.items()}
    streams = [figure.by_stream for figure in figures if figure.by_stream]
    by_stream = tuple(math.fsum(nats) / len(nats) for nats in zip(*streams, strict=True))
    return Pooled(mean.shown, mean.n, _interval(mean, figures), by_seed, by_stream)


def _interval(mean: Figure, figures: Sequence[Figure]) -> tuple[float, float] | None:
    if mean.kind == "accuracy":
        low, high = wilson(math.fsum(f.value * f.n for f in figures), mean.n)
        return 100 * low, 100 * high
    if mean.kind == "perplexity" and all(f.stderr is not None for f in figures):
        # Errors are averaged, not pooled: seeds are scored on the same text, and their errors are not independent.
        error = math.fsum(half_width(f.stderr, f.streams) for f in figures) / len(figures)
        return _exp(mean.value - error), _exp(mean.value + error)
    return None


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
