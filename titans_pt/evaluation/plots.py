"""The evaluations' figures, drawn without a display and without pyplot's global state."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from titans_pt.evaluation.records import write_whole


def plot_needle(summary: dict, path: Path, title: str) -> Path:
    """Heat map of the cells: lengths on x, depths on y, accuracy in colour and in figures with n."""
    lengths = sorted({cell["length"] for cell in summary["cells"]})
    depths = sorted({cell["depth"] for cell in summary["cells"]})
    cells = {(cell["length"], cell["depth"]): cell for cell in summary["cells"]}

    def draw(figure: Figure, axes: Axes) -> None:
        # cividis: even in lightness, and the same to eyes that do not tell red from green.
        percent = [[100 * cells[x, y]["mean"] for x in lengths] for y in depths]
        image = axes.imshow(percent, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                cell = cells[length, depth]
                ink = "white" if cell["mean"] < 0.5 else "black"
                text = f"{100 * cell['mean']:.0f} %\nn = {cell['n']}"
                axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
        axes.set_xlabel("length (tokens, answer included)")
        axes.set_ylabel("depth of the needle in the haystack")
        axes.set_title(title)
        figure.colorbar(image, label="accuracy (%)")

    return _save(path, (2.6 + 1.1 * len(lengths), 1.8 + 0.7 * len(depths)), draw)


def plot_positions(summary: dict, path: Path, title: str) -> Path:
    """Loss against the position in the stream, with 95 % bars, and the unigram baseline's loss."""
    rows = summary["positions"]

    def draw(_: Figure, axes: Axes) -> None:
        middles = [(row["first"] * row["last"]) ** 0.5 for row in rows]
        bars = [1.96 * (row["stderr"] or 0.0) for row in rows]
        means = [row["mean"] for row in rows]
        label = "model (bars: 1.96 standard errors)"
        axes.errorbar(middles, means, yerr=bars, marker="o", capsize=3, color="#0072b2", label=label)
        axes.axhline(summary["unigram_loss"], linestyle="--", color="#d55e00", label="unigram baseline")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens before the scored one (buckets of powers of two)")
        axes.set_ylabel("loss (nats per token)")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()

    return _save(path, (7.0, 4.2), draw)


def _save(path: Path, size: tuple[float, float], draw: Callable[[Figure, Axes], None]) -> Path:
    # Titles are longer than a map of one column is wide.
    figure = Figure(figsize=(max(size[0], 6.0), max(size[1], 3.0)), layout="constrained")
    draw(figure, figure.subplots())
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))
    return path
