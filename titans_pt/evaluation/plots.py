"""The evaluations' figures."""

from itertools import cycle
from math import nan
from pathlib import Path

from titans_pt.tools.plots import from_zero, legend, length_axis, new_figure, own_style, powers_of_two, save_figure


@own_style()
def plot_heat(cells: list[dict], path: Path, title: str) -> Path:
    """Heat map: lengths on x, depths on y, accuracy in colour and in figures with n."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    by_place = {(cell["length"], cell["depth"]): cell for cell in cells}
    # Wide enough for the title, even if the map has one column.
    figure = new_figure(max(2.6 + 1.1 * len(lengths), 6.0), max(1.8 + 0.7 * len(depths), 3.0))
    axes = figure.subplots()
    # cividis: uniform in lightness, and the same for readers who do not tell red from green.
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
    return save_figure(figure, path)


@own_style()
def plot_cost(lines: dict[str, list[dict]], path: Path, title: str) -> Path:
    """Reading speed and peak memory against length, one line per name."""
    figure = new_figure(10.0, 4.2)
    speed, memory = figure.subplots(1, 2)
    drawn = []
    for rows in lines.values():
        lengths = [row["length"] for row in rows]
        drawn += speed.plot(lengths, [row["prefill_tokens_per_s"] for row in rows], marker="o")
        memory.plot(lengths, [row["peak_memory"] / 2**20 for row in rows], marker="o")
    for part, label in ((speed, "prefill (tokens/s)"), (memory, "peak memory (MiB)")):
        length_axis(part)
        from_zero(part)
        part.set_ylabel(label)
    legend(speed, drawn, list(lines), fontsize=8)
    figure.suptitle(title)
    return save_figure(figure, path)


@own_style()
def plot_positions(summary: dict, path: Path, title: str) -> Path:
    """Loss against the position in the stream with 95 % bars, also with frozen memory, and the unigram baseline."""
    curves = [("model (bars: 1.96 standard errors)", summary["positions"], "#0072b2")]
    for row, ink in zip(summary["frozen"], cycle(["#009e73", "#cc79a7", "#e69f00", "#56b4e9"]), strict=False):
        curves.append((f"memory frozen after {row['after']:,} tokens", row["positions"], ink))
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    for label, rows, ink in curves:
        middles = [(row["first"] * row["last"]) ** 0.5 for row in rows]
        bars = [1.96 * (row["stderr"] or 0.0) for row in rows]
        means = [row["mean"] for row in rows]
        axes.errorbar(middles, means, yerr=bars, marker="o", capsize=3, color=ink, label=label)
    axes.axhline(summary["unigram_loss"], linestyle="--", color="#d55e00", label="unigram baseline")
    powers_of_two(axes)
    axes.set_xlabel("tokens before the scored one (buckets of powers of two)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, path)
