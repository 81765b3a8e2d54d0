"""One measured number with its uncertainty, and how those of several seeds become one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from titans_pt.tools.statistics import wilson

Z = 1.959964
"""Standard errors to each side of a 95 % interval."""


@dataclass(frozen=True)
class Figure:
    """``value``: a share of right answers (accuracy), nats per token (perplexity), or any number.

    ``n``: what it was measured on, questions or tokens. ``stderr``: of the nats.
    """

    kind: Literal["accuracy", "perplexity", "number"]
    value: float
    n: int
    stderr: float | None = None

    @property
    def shown(self) -> float:
        """As a table has it: accuracies in percent, a perplexity as such."""
        return {"accuracy": 100 * self.value, "perplexity": _exp(self.value)}.get(self.kind, self.value)


@dataclass(frozen=True)
class Pooled:
    """The mean over seeds, as shown; ``interval`` of 95 % that comes from the samples of the evaluation, not from the
    seeds; each seed's own value beside it."""

    mean: float
    n: int
    interval: tuple[float, float] | None
    by_seed: dict[int, float]


def pool(found: dict[int, Figure]) -> Pooled:
    """Figures of one kind by seed. Perplexities are averaged as nats; questions of all seeds count together."""
    figures = list(found.values())
    mean = Figure(figures[0].kind, math.fsum(f.value for f in figures) / len(figures), sum(f.n for f in figures))
    by_seed = {seed: figure.shown for seed, figure in found.items()}
    return Pooled(mean.shown, mean.n, _interval(mean, figures), by_seed)


def _interval(mean: Figure, figures: Sequence[Figure]) -> tuple[float, float] | None:
    if mean.kind == "accuracy":
        low, high = wilson(math.fsum(f.value * f.n for f in figures), mean.n)
        return 100 * low, 100 * high
    if mean.kind == "perplexity" and all(f.stderr is not None for f in figures):
        # Seeds are scored on the same text: their errors are not independent, so they are averaged, not pooled.
        error = Z * math.fsum(f.stderr for f in figures) / len(figures)
        return _exp(mean.value - error), _exp(mean.value + error)
    return None


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
