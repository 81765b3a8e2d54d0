"""The evaluations' figures, drawn without a display and without pyplot's global state."""

from collections.abc import Callable
from itertools import cycle
from math import nan
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from titans_pt.evaluation.records import write_whole


def plot_heat(cells: list[dict], path: Path, title: str) -> Path:
    """Heat map: lengths on x, depths on y, accuracy in colour and in figures with n."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    by_place = {(cell["length"], cell["depth"]): cell for cell in cells}

    def draw(figure: Figure, axes: Axes) -> None:
        # cividis: even in lightness, and the same to eyes that do not tell red from green.
        percent = [[100 * by_place[x, y]["mean"] if (x, y) in by_place else nan for x in lengths] for y in depths]
        image = axes.imshow(percent, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for (length, depth), cell in by_place.items():
            ink = "white" if cell["mean"] < 0.5 else "black"
            text = f"{100 * cell['mean']:.0f} %\nn = {cell['n']}"
            place = lengths.index(length), depths.index(depth)
            axes.text(*place, text, ha="center", va="center", color=ink, fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
        axes.set_xlabel("length (tokens, answer included)")
        axes.set_ylabel("depth of the needle in the haystack")
        axes.set_title(title)
        figure.colorbar(image, label="accuracy (%)")

    return _save(path, (2.6 + 1.1 * len(lengths), 1.8 + 0.7 * len(depths)), draw)


def plot_accuracy(lines: dict[str, list[dict]], path: Path, title: str) -> Path:
    """Accuracy against length, a line for each name; its rows have length, mean and the 95 % interval low, high."""

    def draw(_: Figure, axes: Axes) -> None:
        for name, rows in lines.items():
            percent = {key: [100 * row[key] for row in rows] for key in ("mean", "low", "high")}
            lengths = [row["length"] for row in rows]
            axes.plot(lengths, percent["mean"], marker="o", label=name)
            axes.fill_between(lengths, percent["low"], percent["high"], alpha=0.15)
        _length_axis(axes)
        axes.set_ylim(-3, 103)
        axes.set_ylabel("accuracy (%; bands: Wilson 95 %)")
        axes.set_title(title)
        axes.legend(fontsize=8)

    return _save(path, (7.0, 4.2), draw)


def plot_cost(lines: dict[str, list[dict]], path: Path, title: str) -> Path:
    """Reading speed and peak memory against length, a line for each name."""

    def draw(figure: Figure, axes: Axes) -> None:
        axes.remove()
        speed, memory = figure.subplots(1, 2)
        for name, rows in lines.items():
            lengths = [row["length"] for row in rows]
            speed.plot(lengths, [row["prefill_tokens_per_s"] for row in rows], marker="o", label=name)
            memory.plot(lengths, [row["peak_memory"] / 2**20 for row in rows], marker="o", label=name)
        for part, label in ((speed, "prefill (tokens/s)"), (memory, "peak memory (MiB)")):
            _length_axis(part)
            part.set_ylim(bottom=0)
            part.set_ylabel(label)
        speed.legend(fontsize=8)
        figure.suptitle(title)

    return _save(path, (10.0, 4.2), draw)


def _length_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("length (tokens, answer included)")
    axes.grid(alpha=0.3)


def plot_positions(summary: dict, path: Path, title: str) -> Path:
    """Loss against the position in the stream with 95 % bars, also with frozen memory; the unigram baseline's."""
    curves = [("model (bars: 1.96 standard errors)", summary["positions"], "#0072b2")]
    for row, ink in zip(summary["frozen"], cycle(["#009e73", "#cc79a7", "#e69f00", "#56b4e9"]), strict=False):
        curves.append((f"memory frozen after {row['after']:,} tokens", row["positions"], ink))

    def draw(_: Figure, axes: Axes) -> None:
        for label, rows, ink in curves:
            middles = [(row["first"] * row["last"]) ** 0.5 for row in rows]
            bars = [1.96 * (row["stderr"] or 0.0) for row in rows]
            means = [row["mean"] for row in rows]
            axes.errorbar(middles, means, yerr=bars, marker="o", capsize=3, color=ink, label=label)
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
