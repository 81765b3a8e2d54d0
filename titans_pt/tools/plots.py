"""Common parts of all figures: drawn without a display, in one style, and written whole or not at all.

matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_pt.errors import UserError
from titans_pt.tools.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend


def import_matplotlib() -> Any:
    """Imports matplotlib without the environment's backend: a notebook's is unknown elsewhere, and none is needed."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib

        return matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Decorates a function that draws: figures use matplotlib's defaults, not the user's settings.

    The settings are usetex, fonts and colours, for example. A $ does not start a formula.
    """
    matplotlib = import_matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    import_matplotlib()
    from matplotlib.figure import Figure  # no pyplot: it keeps global state and picks a display

    return Figure(figsize=(width, height), layout="constrained")


def figure_format(path: Path) -> str:
    """The figure format by the suffix of its file name, such as pdf.

    Raises:
        UserError: matplotlib cannot write this format.
    """
    import_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if (suffix := path.suffix.removeprefix(".").lower()) not in known:
        raise UserError(f"{path}: no figure can be written as {path.suffix or 'a name without an end'}; end it in "
                        f"one of .{', .'.join(sorted(known))}")  # fmt: skip
    return suffix


def save_figure(figure: Figure, path: Path, dpi: int = 130) -> Path:
    """Writes a figure, whole or not at all, in the format of its suffix; returns ``path``."""
    kind = figure_format(path)
    _find_fonts(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # one for each character: _find_fonts warns already
        write_atomically(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=dpi))
    return path


def legend(where: Axes | Figure, handles: Sequence[Artist], names: Sequence[str], **options: Any) -> Legend:
    """A legend with all names: matplotlib would leave out names that begin with an underscore."""
    made = where.legend(handles, [f"{n}" for n in range(len(names))], **options)
    for text, name in zip(made.get_texts(), names, strict=True):
        text.set_text(name)
    return made


def _find_fonts(figure: Figure) -> None:
    """Gives texts with characters that matplotlib's own font lacks (Chinese, emoji) installed fonts that have them."""
    from matplotlib.text import Text

    missing: dict[Text, frozenset[str]] = {}
    for text in figure.findobj(Text):
        # A file name with bytes outside the locale's encoding has surrogates, which no font has.
        text.set_text(text.get_text().encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        used = frozenset(c for c in text.get_text() if ord(c) > 127 and c.isprintable())
        own = "DejaVu Sans Mono" if "monospace" in text.get_fontfamily() else "DejaVu Sans"
        if used and (unknown := used - _covered(_file_of(own))):
            missing[text] = unknown
    if missing:
        families, lost = _fallbacks(frozenset().union(*missing.values()))
        for text in missing:
            text.set_fontfamily([*text.get_fontfamily(), *families])
        if lost:
            _tell_lost(lost)


@functools.cache
def _file_of(family: str) -> str:
    from matplotlib import font_manager

    return font_manager.findfont(family, rebuild_if_missing=False)


@functools.cache
def _covered(path: str) -> frozenset[str]:
    """Characters of a font file; empty if matplotlib cannot draw with it."""
    from matplotlib import font_manager

    try:
        font = font_manager.get_font(path)
        font.set_size(12, 72)  # fails for bitmap fonts, such as coloured emoji
        return frozenset(map(chr, font.get_charmap()))
    except (RuntimeError, OSError, ValueError):
        return frozenset()


@functools.cache
def _fallbacks(missing: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """(as few installed font families as possible that have ``missing``, characters that no font has)."""
    from matplotlib import font_manager

    manager, families = font_manager.fontManager, []
    known = {entry.fname for entry in manager.ttflist}
    for path in sorted({*font_manager.findSystemFonts()} - known):  # installed since matplotlib made its list
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            manager.addfont(path)
    # matplotlib's "Last Resort" font draws a box for every character, as matplotlib does without any font.
    regular = [
        entry for entry in manager.ttflist
        if entry.style == "normal" and entry.weight in (400, "normal", "regular") and "Last Resort" not in entry.name
    ]  # fmt: skip
    while missing and regular:
        best = max(regular, key=lambda entry: len(missing & _covered(entry.fname)))
        if not (found := missing & _covered(best.fname)):
            break
        families.append(best.name)
        missing -= found
    return families, missing


@functools.cache
def _tell_lost(lost: frozenset[str]) -> None:
    some = ", ".join(sorted(lost)[:5])
    print(
        f"pictures: no installed font has {len(lost)} of the characters ({some}): boxes stand for them; install a font "
        "that has them, such as Noto Sans CJK, or Noto Emoji",
        file=sys.stderr,
    )


def styles(count: int) -> list[dict]:
    """A colour and a marker for each line: colours repeat after ten, with another marker."""
    return [{"color": f"C{n % 10}", "marker": "os^v"[n // 10 % 4]} for n in range(count)]


def stroke(n: int) -> dict[str, Any]:
    """Colour and dash of the n-th line without markers: colours repeat after ten lines, with another dash."""
    return {"color": f"C{n % 10}", "linestyle": ("-", "--", "-.")[n // 10 % 3]}


def from_zero(axes: Axes) -> None:
    """Sets y from zero to a little above the highest point: without this margin, markers at the top are cut."""
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else None)


def powers_of_two(axes: Axes) -> None:
    """Formats the x axis for whole numbers, in powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def length_axis(axes: Axes) -> None:
    """Formats the x axis for lengths of texts, in powers of two."""
    powers_of_two(axes)
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("length (tokens, answer included)")
    axes.grid(alpha=0.3)


@own_style()
def plot_accuracy(
    lines: dict[str, list[dict]],
    path: Path,
    title: str,
    levels: dict[str, float] | None = None,
    bands: str = "bands: Wilson 95 %",
) -> Path:
    """Accuracy against length, one line per name.

    Args:
        lines: rows have length, mean, low and high (the ends of the band). If the line is a mean of several values,
            rows also have the list ``each`` of these values, drawn as dots.
        levels: accuracies to compare with, drawn as dotted lines.
        bands: meaning of the bands, for the axis.
    """
    many = len(lines) > 5  # place their names beside the axes
    figure = new_figure(9.5 if many else 7.0, 4.8 if many else 4.2)
    axes = figure.subplots()
    drawn = []
    for rows, style in zip(lines.values(), styles(len(lines)), strict=True):
        percent = {key: [100 * row[key] for row in rows] for key in ("mean", "low", "high")}
        lengths = [row["length"] for row in rows]
        drawn += axes.plot(lengths, percent["mean"], **style)
        ink = drawn[-1].get_color()
        axes.fill_between(lengths, percent["low"], percent["high"], alpha=0.15, color=ink)
        for row in rows:
            each = row.get("each", ())
            axes.plot([row["length"]] * len(each), [100 * mean for mean in each], ".", color=ink, alpha=0.5)
    for level in (levels or {}).values():
        drawn.append(axes.axhline(100 * level, linestyle=":", color="grey"))
    length_axis(axes)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("accuracy (%)")
    axes.set_title(title)
    axes.annotate(bands, (0, 1.01), xycoords="axes fraction", fontsize=7, color="grey")
    place = (figure, "outside right upper") if many else (axes, "best")
    legend(place[0], drawn, [*lines, *(levels or {})], fontsize=8, loc=place[1])
    return save_figure(figure, path)


Points = Sequence[Sequence[float]]
"""(tokens, loss) of each step; further entries are ignored."""


@own_style()
def plot_losses(
    curves: Mapping[str, tuple[Points, Points]], path: Path, unit: str, inks: Sequence[dict[str, Any]] | None = None
) -> Path:
    """Training loss and validation loss against tokens, one line per name.

    Args:
        curves: (training, validation) losses by name.
        unit: unit of the loss.
        inks: styles of the lines; None: those of :func:`stroke`.
    """
    inks = inks or [stroke(n) for n in range(len(curves))]
    figure = new_figure(12.5, 4.6)
    drawn = []
    panels = list(zip(figure.subplots(1, 2), ("training", "validation"), strict=True))
    for pair, ink in zip(curves.values(), inks, strict=True):
        for (axes, _), points in zip(panels, pair, strict=True):
            (line,) = axes.plot([point[0] for point in points], [point[1] for point in points], **ink)
        drawn.append(line)
    for axes, kind in panels:
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"{kind} loss ({unit})")
        axes.grid(alpha=0.3)
    legend(figure, drawn, list(curves), fontsize=8, loc="outside right upper")
    return save_figure(figure, path)
