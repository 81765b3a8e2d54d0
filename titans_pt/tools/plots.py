"""What all figures share: made without a display, saved whole. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from titans_pt.errors import UserError
from titans_pt.tools.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; inches."""
    from matplotlib.figure import Figure  # no pyplot: it keeps global state and picks a display

    return Figure(figsize=(width, height), layout="constrained")


def figure_format(path: Path) -> str:
    """The format that the end of a figure's name stands for, such as pdf.

    Raises:
        UserError: for none that matplotlib writes.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if (suffix := path.suffix.removeprefix(".").lower()) not in known:
        raise UserError(f"{path}: no figure can be written as {path.suffix or 'a name without an end'}; end it in "
                        f"one of .{', .'.join(sorted(known))}")  # fmt: skip
    return suffix


def save_figure(figure: Figure, path: Path, dpi: int = 130) -> Path:
    """Writes a figure in the format that its name ends in, as a whole or not at all; returns ``path``."""
    kind = figure_format(path)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=dpi))
    return path


def styles(count: int) -> list[dict]:
    """A colour and a marker for each of many lines: the colours begin again after ten, with another marker."""
    return [{"color": f"C{n % 10}", "marker": "os^v"[n // 10 % 4]} for n in range(count)]


def from_zero(axes: Axes) -> None:
    """y from zero to a little above the highest point: without the room, markers of nearly equal points are cut."""
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else None)


def length_axis(axes: Axes) -> None:
    """Lengths of texts on x, in powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("length (tokens, answer included)")
    axes.grid(alpha=0.3)


def plot_accuracy(lines: dict[str, list[dict]], path: Path, title: str) -> Path:
    """Accuracy against length, one line per name.

    Rows have length, mean, the 95 % interval low, high, and, if the line is the mean of several, ``each`` of them, for
    dots.
    """
    many = len(lines) > 10  # more lines than colours: their names stand beside the axes
    figure = new_figure(9.5 if many else 7.0, 4.8 if many else 4.2)
    axes = figure.subplots()
    for (name, rows), style in zip(lines.items(), styles(len(lines)), strict=True):
        percent = {key: [100 * row[key] for row in rows] for key in ("mean", "low", "high")}
        lengths = [row["length"] for row in rows]
        ink = axes.plot(lengths, percent["mean"], label=name, **style)[0].get_color()
        axes.fill_between(lengths, percent["low"], percent["high"], alpha=0.15, color=ink)
        for row in rows:
            each = row.get("each", ())
            axes.plot([row["length"]] * len(each), [100 * mean for mean in each], ".", color=ink, alpha=0.5)
    length_axis(axes)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("accuracy (%; bands: Wilson 95 %)")
    axes.set_title(title)
    (figure if many else axes).legend(fontsize=8, loc="outside right upper" if many else "best")
    return save_figure(figure, path)
