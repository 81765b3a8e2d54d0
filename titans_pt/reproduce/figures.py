"""A measured number with its uncertainty, and the pooling of several seeds."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, final

from titans_pt.tools.statistics import (
    Effects,
    effects_of,
    half_width,
    half_width_of_sum,
    perplexity,
    ratio_error,
    variance_within,
    wilson,
)

_Model = TypeVar("_Model", bound=Hashable)


@final
@dataclass(frozen=True)
class Figure:
    """One figure. ``value``: the share of right answers (accuracy), nats per token (perplexity), or any number.

    ``n``: number of questions or tokens that it was measured on. ``stderr``: standard error of the nats over
    ``streams`` streams of text. ``by_stream``: nats of each stream, in the order of the text; empty if not kept.
    ``length``: tokens per stream, of which the last may have fewer; 0: all streams are equally long.
    """

    kind: Literal["accuracy", "perplexity", "number"]
    value: float
    n: int
    stderr: float | None = None
    streams: int = 0
    by_stream: tuple[float, ...] = ()
    length: int = 0

    @property
    def sizes(self) -> list[int]:
        """Tokens of each stream."""
        others = len(self.by_stream) - 1
        return [self.length] * others + [self.n - others * self.length] if self.length else [1] * (others + 1)

    @property
    def shown(self) -> float:
        """Value in a table's unit: an accuracy in percent, a perplexity as exp(nats)."""
        return {"accuracy": 100 * self.value, "perplexity": perplexity(self.value)}.get(self.kind, self.value)


@dataclass(frozen=True)
class Pooled:
    """Mean over seeds in a table's unit, with each seed's own figure.

    ``interval``: the 95 % interval over the samples of the evaluation, not over seeds; None if the figures give none.
    ``by_stream``: nats of each stream, as means over the seeds that have them.
    """

    mean: float
    n: int
    interval: tuple[float, float] | None
    figures: dict[int, Figure]
    by_stream: tuple[float, ...] = ()

    @property
    def by_seed(self) -> dict[int, float]:
        """Each seed's own value, in a table's unit."""
        return {seed: figure.shown for seed, figure in self.figures.items()}


def pool(found: dict[int, Figure]) -> Pooled:
    """Pool the figures of several seeds, all of one kind. Perplexities are averaged in nats.

    Accuracies of several seeds have no interval: seeds answer the same questions, and they differ by far more than
    answers do.
    """
    figures = list(found.values())
    mean = Figure(figures[0].kind, math.fsum(f.value for f in figures) / len(figures), sum(f.n for f in figures))
    streams = [figure.by_stream for figure in figures if figure.by_stream]
    alike = len({len(nats) for nats in streams}) == 1
    by_stream = tuple(math.fsum(nats) / len(nats) for nats in zip(*streams, strict=True)) if alike else ()
    return Pooled(mean.shown, mean.n, _interval(mean, figures), found, by_stream)


@dataclass(frozen=True)
class Apart:
    """Difference in nats, and half the width of its 95 % interval."""

    nats: float
    error: float

    @property
    def tie(self) -> bool:
        """Whether the interval contains 0."""
        return abs(self.nats) <= self.error

    def told(self, sign: str = "") -> str:
        """Difference and interval as text. ``sign``: "+" marks positive differences with a plus."""
        low, high = self.nats - self.error, self.nats + self.error
        return f"{self.nats:{sign}.3f} ({low:.3f} to {high:.3f}){', a tie' if self.tie else ''}"


def of_models_and_seeds(models: Mapping[_Model, Pooled]) -> Effects:
    """Nats of each model on all seeds alike, and the variance beside what models and seeds explain. A model with one
    seed, which may be a hard one, can then be compared with a model that has three."""
    return effects_of({(name, seed): figure.value for name, model in models.items()
                       for seed, figure in model.figures.items()})  # fmt: skip


@dataclass(frozen=True)
class BetweenSeeds:
    """Variances of a model's nats between its seeds, pooled over models, each with its degrees of freedom.

    ``own``: of what a seed does to one model alone, which the difference of two models on the same seeds keeps.
    ``all``: also of what it does to all models, such as the order of the samples, which that difference loses.
    """

    own: tuple[float, int]
    all: tuple[float, int]

    @staticmethod
    def of(models: Iterable[Pooled]) -> "BetweenSeeds":
        """Variances between the seeds of ``models``; 0 degrees of freedom if the seeds are too few."""
        models = list(models)
        together = variance_within([[figure.value for figure in model.figures.values()] for model in models])
        own = of_models_and_seeds(dict(enumerate(models))).variance
        return BetweenSeeds(own if own[1] else together, together)


def apart(own: Pooled, other: Pooled, seeds: BetweenSeeds) -> Apart:
    """Nats by which ``own`` is behind ``other``, with an interval over streams and seeds together.

    Only seeds that both models have are compared; all seeds if they have none in common. The loss of one model, seed
    and stream is taken as a sum of random effects around the model's mean: of the stream and of the seed on all models,
    of model x stream, of model x seed, and of the rest. The first two cancel in the difference of two models on the
    same streams and seeds. The variance of the difference is estimated as a sum of two parts: the variance over streams
    of the difference (of means over seeds) divided by the number of streams, and the variance between seeds divided by
    the number of seeds of each model. The rest (seed x stream) counts twice, which makes the interval slightly wider
    than needed (Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1, 2007). The interval holds for one pair,
    not for all pairs at once.

    Args:
        own, other: figures in nats with the same streams, at least two.
        seeds: all models share these variances, because two or three seeds say little about the variance of their own
            model; a model with one seed also has them. With 0 degrees of freedom the interval leaves the seeds out.
    """
    pairs, (variance, freedom) = [(own, other)], seeds.all
    if common := sorted(own.figures.keys() & other.figures.keys()):
        own, other = (pool({seed: each.figures[seed] for seed in common}) for each in (own, other))
        pairs, (variance, freedom) = [(own, other), *pairs], seeds.own
    nats = [math.fsum(f.value for f in each.figures.values()) / len(each.figures) for each in (own, other)]
    # Early records have no losses of streams: other seeds of the same models then tell how streams differ.
    alike = [pair for pair in pairs if len(pair[0].by_stream) == len(pair[1].by_stream) > 1]
    if not alike:  # different texts
        return Apart(nats[0] - nats[1], math.inf)
    first, second = alike[0]
    streams = [a - b for a, b in zip(first.by_stream, second.by_stream, strict=True)]
    sizes = next(figure.sizes for figure in first.figures.values() if figure.by_stream)
    error = ratio_error(sizes, streams)
    assert error is not None  # of two streams at least
    of_seeds = variance * (1 / len(own.figures) + 1 / len(other.figures))
    parts = [(error**2, len(streams) - 1), (of_seeds, freedom)]
    return Apart(nats[0] - nats[1], half_width_of_sum(parts))


def _interval(mean: Figure, figures: Sequence[Figure]) -> tuple[float, float] | None:
    if mean.kind == "accuracy" and len(figures) == 1:
        low, high = wilson(mean.value * mean.n, mean.n)
        return 100 * low, 100 * high
    widths = [half_width(f.stderr, f.streams) for f in figures if f.stderr is not None]
    if mean.kind == "perplexity" and len(widths) == len(figures):
        # Errors are averaged, not pooled: seeds are scored on the same text, and their errors are not independent.
        error = math.fsum(widths) / len(figures)
        return perplexity(mean.value - error), perplexity(mean.value + error)
    return None
