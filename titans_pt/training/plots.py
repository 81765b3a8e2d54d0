"""The loss curve of a run."""

from pathlib import Path
from typing import Any

from titans_pt.tools.plots import new_figure, save_figure


def plot_loss(records: list[dict[str, Any]], unigram_loss: float | None, path: Path):
    """Draws training and validation loss (nats per token) over steps, and the unigram baseline, as a PNG.

    Args:
        records: of metrics.jsonl.
        unigram_loss: loss of predicting every token by its frequency alone: what a model must beat to have learned.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for kind, key, label, style in (
        ("train", "loss", "training", {"linewidth": 1}),
        ("validation", "validation_loss", "validation", {"marker": "o", "markersize": 4}),
    ):
        points = [(r["step"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if unigram_loss is not None:
        axes.axhline(unigram_loss, color="grey", linestyle="--", linewidth=1, label="unigram baseline")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path, dpi=120)
