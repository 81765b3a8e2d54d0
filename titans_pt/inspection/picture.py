"""Picture of an inspection: where the memory was surprised, and by which words."""

from __future__ import annotations

import functools
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titans_pt.inspection.inspection import Inspection, shown
from titans_pt.tools.plots import new_figure, own_style, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap, Normalize

WIDTH = 14.0
"""Width of the picture in inches."""
COLUMNS, ROWS, EXCERPT = 120, 15, 400
"""Limits of the excerpt: characters per line, lines, tokens."""
STRETCH = 16
"""Tokens of a stretch; the stretch with the highest mean is the most surprising."""
# White is usual surprise, colour more than usual; black text is readable on all of them.
SURPRISE = ["#ffffff", "#ffe9a8", "#fdb863", "#ef6548"]
GATES = {"theta": "theta (step)", "eta": "eta (momentum)", "alpha": "alpha (forgetting)"}
NORMS = {"surprise": "||u|| (surprise)", "weight_norm": "||M||", "momentum_norm": "||S||"}


@own_style()
def draw(result: Inspection, path: Path, title: str) -> Path:
    """Draw and write the picture (PNG).

    From top to bottom: the text around the most surprising stretch, surprise by memory and position, its mean with the
    model's loss, gates and norms.
    """
    import matplotlib
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    relative, score = result.relative, result.score
    norm = Normalize(1.0, max(1.5, float(np.quantile(np.nan_to_num(relative, posinf=0.0), 0.99))), clip=True)
    first, last, lines = excerpt(result.pieces, score)

    heights = [0.24 * (len(lines) + 1), max(1.2, 0.16 * len(relative)), 1.5, 1.5, 1.5]
    figure = new_figure(WIDTH, sum(heights) + 3.6)
    figure.suptitle(title, fontsize=15)
    grid = figure.add_gridspec(len(heights), height_ratios=heights)
    text, heat, curve, loss = (figure.add_subplot(grid[row]) for row in range(4))

    _draw_text(text, lines, score, norm)
    text.set_title(f"tokens {first} to {last - 1}, around the most surprising stretch", loc="left", fontsize=11)

    # At most 1000 columns, each wider than a pixel; a column of several tokens shows the most surprising one.
    pooled = np.maximum.reduceat(relative, np.arange(0, len(score), -(-len(score) // 1000)), axis=1)
    extent = (-0.5, len(score) - 0.5, len(relative) - 0.5, -0.5)
    image = heat.imshow(pooled, cmap=_colours(), norm=norm, aspect="auto", interpolation="nearest", extent=extent)
    heat.add_patch(Rectangle((first - 0.5, -0.5), last - first, len(relative), fill=False, linewidth=1.5))
    names = [name.removesuffix(".mixer.memory") for name in result.memories]
    step = -(-len(names) // 12)
    heat.set_yticks(range(0, len(names), step), names[::step])
    heat.set_title("surprise ||grad|| of every token, in each memory (box: the text above)", loc="left", fontsize=11)
    bar = figure.colorbar(image, ax=[text, heat], aspect=40, pad=0.01, extend="both")
    bar.set_label("times the median around")

    length = max(1, len(score) // 100)
    smooth = "" if length == 1 else f", running mean of {length} tokens"
    for axes, values, label, colour in (
        (curve, score, "surprise, times the median around, mean over memories", "#d7301f"),
        (loss, result.nll, "the model's own loss, nats per token", "#2b5c8a"),
    ):
        axes.plot(values, color=colour, alpha=0.25, linewidth=0.5)
        axes.plot(running_mean(values, length), color=colour, linewidth=1.5)
        axes.axvspan(first, last - 1, color="black", alpha=0.06)
        axes.set_title(label + smooth, loc="left", fontsize=11)
        # One outlier must not flatten the curve.
        if len(known := values[np.isfinite(values)]):
            axes.set_ylim(top=1.1 * np.quantile(known, 0.998))
    for axes in (heat, curve, loss):
        axes.set_xlim(-0.5, len(score) - 0.5)
    loss.set_xlabel("token")

    panels = grid[4].subgridspec(1, len(GATES) + len(NORMS) + 1, width_ratios=[1] * (len(GATES) + len(NORMS)) + [0.3])
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    for column, (field, label) in enumerate((GATES | NORMS).items()):
        axes = figure.add_subplot(panels[0, column])
        for n, values in enumerate(getattr(result, field).mean(-1)):
            shown = len(names) <= 6 or n in (0, len(names) - 1)
            axes.plot(running_mean(values, length), color=colours[n], linewidth=1, label=names[n] if shown else None)
        axes.set_title(label, loc="left", fontsize=11)
        axes.set_xlabel("token")
        axes.grid(alpha=0.3)
    key = figure.add_subplot(panels[0, -1])
    key.set_axis_off()
    key.legend(*axes.get_legend_handles_labels(), loc="center", fontsize=9, frameon=False)
    return save_figure(figure, path, dpi=110)


def running_mean(values: np.ndarray, length: int) -> np.ndarray:
    """(T,) -> (T,): mean over ``length`` tokens around each token, fewer at the ends; NaN is left out."""
    known = np.isfinite(values)
    window = np.ones(length)
    total = np.convolve(np.where(known, values, 0.0), window, "same")[: len(values)]
    count = np.convolve(known.astype(float), window, "same")[: len(values)]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def excerpt(pieces: np.ndarray, score: np.ndarray) -> tuple[int, int, list[list[tuple[int, int, str]]]]:
    """Return the tokens [first, last) around the most surprising stretch, and their lines of (token, column, text).

    In texts of more than 256 tokens the search begins after the first 64: a memory that has read nothing is surprised
    by anything.
    """
    means = running_mean(score, min(STRETCH, len(score)))
    skip = 64 if len(score) > 256 else 0
    middle = skip + int(means[skip:].argmax())
    half = EXCERPT // 2
    while True:
        first = max(0, min(middle - half, len(score) - 2 * half))
        last = min(len(score), first + 2 * half)
        lines = wrap(pieces, first, last)
        if len(lines) <= ROWS or half <= STRETCH:
            return first, last, lines
        half -= 4


def wrap(pieces: np.ndarray, first: int, last: int) -> list[list[tuple[int, int, str]]]:
    """Wrap tokens [first, last) into lines of COLUMNS characters, breaking tokens if needed; newlines show and break.

    Returns:
        lines of (token, column, text).
    """
    lines: list[list[tuple[int, int, str]]] = [[]]
    column = 0
    for t in range(first, last):
        for character in pieces[t]:
            seen = shown(character)
            if column + columns(seen) > COLUMNS:
                lines.append([])
                column = 0
            if lines[-1] and lines[-1][-1][0] == t:
                token, start, text = lines[-1].pop()
                lines[-1].append((token, start, text + seen))
            else:
                lines[-1].append((t, column, seen))
            column += columns(seen)
            if character == "\n":
                column = COLUMNS
    return lines


@functools.cache
def _colours() -> LinearSegmentedColormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("surprise", SURPRISE)


def columns(character: str) -> int:
    """Columns that a character takes in a monospaced text: 2 for Chinese and emoji, 0 for a combining accent."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _draw_text(axes: Axes, lines: list, score: np.ndarray, norm: Normalize):
    """Draw the text in a grid of characters, each token on the colour of its surprise."""
    from matplotlib.patches import Rectangle

    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(len(lines), 0)
    axes.set_axis_off()
    # A monospaced character is 0.602 of its size wide; the axes are about 0.9 of the picture.
    size = 0.9 * WIDTH * 72 / COLUMNS / 0.602
    for row, line in enumerate(lines):
        for token, column, text in line:
            colour, width = _colours()(norm(score[token])), sum(map(columns, text))
            axes.add_patch(Rectangle((column, row), width, 1, facecolor=colour, edgecolor="none"))
            # Wide characters come from other fonts, not exactly two columns wide: each is placed separately.
            parts = [text] if width == len(text) else _clusters(text)
            for part in parts:
                axes.text(column, row + 0.5, part, family="monospace", fontsize=size, va="center_baseline")
                column += sum(map(columns, part))


def _clusters(text: str) -> list[str]:
    """Split a text into characters, each with its combining accents."""
    parts: list[str] = []
    for character in text:
        if parts and columns(character) == 0:
            parts[-1] += character
        else:
            parts.append(character)
    return parts
