"""The loss curve of a run."""

from pathlib import Path
from typing import Any

from titans_pt.tools.plots import new_figure, own_style, save_figure


@own_style()
def plot_loss(
    records: list[dict[str, Any]], path: Path, unit: str, baseline_name: str = "", baseline: float | None = None,
    title: str = "",
):  # fmt: skip
    """Draws training and validation loss over steps, and a baseline.

    Args:
        records: records of metrics.jsonl.
        unit: unit of the loss.
        baseline: the loss of a trivial model (for language: each token by its frequency alone), which a model must
            beat to have learned anything; None: not drawn.
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
    if baseline is not None:
        axes.axhline(baseline, color="grey", linestyle="--", linewidth=1, label=baseline_name)
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path, dpi=120)
