"""Common parts of all figures."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.image import imread
from matplotlib.text import Text

import titans_pt
from titans_pt.tools import plots
from titans_pt.tools.plots import from_zero, new_figure, plot_accuracy


@pytest.mark.parametrize("points", [[600.0, 600.0, 600.0], [600.0, 600.5], [0.0, 0.0], [3.0]])
def test_markers_of_equal_points_are_not_cut(points):
    """Half a marker's height lies above the highest point."""
    figure = new_figure(10.0, 4.2)
    axes = figure.subplots()
    (line,) = axes.plot(range(len(points)), points, marker="o")
    from_zero(axes)
    figure.canvas.draw()
    highest = axes.transData.transform((0, max(points)))[1]
    radius = line.get_markersize() / 2 * figure.dpi / 72
    assert highest + radius <= axes.bbox.y1 and axes.get_ylim()[0] == 0


def test_accuracy_of_several_lines(tmp_path):
    row = {"mean": 0.5, "low": 0.1, "high": 0.9}
    lines = {name: [{"length": n, **row} for n in (1024, 2**20)] for name in ("a", "b")}
    path = plot_accuracy(lines, tmp_path / "accuracy.png", "title")
    assert imread(path).std() > 0.05 and list(tmp_path.iterdir()) == [path]


ROW = {"length": 1024, "mean": 0.5, "low": 0.1, "high": 0.9}


@pytest.fixture
def saved(monkeypatch):
    """The figures that were saved."""
    figures = []
    keep = plots.save_figure
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: (figures.append(figure), keep(figure, path))[1])
    return figures


def test_names_stand_in_the_legend_as_they_are(saved, tmp_path):
    names = ["_baseline", "__", "cost $5 or $6", "a_1^2", "$x$", "\\alpha", "plain"]
    plot_accuracy({name: [ROW] for name in names}, tmp_path / "accuracy.png", "run_1 for $5, then $6")
    (figure,) = saved
    (axes,) = figure.axes
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert not any(text.get_parse_math() for text in figure.findobj(Text))


def test_pictures_do_not_depend_on_the_users_style(tmp_path):
    first = plot_accuracy({"a": [ROW]}, tmp_path / "first.png", "title")
    theirs = {"text.usetex": True, "figure.dpi": 30, "savefig.transparent": True, "font.size": 30, "axes.grid": False}
    with matplotlib.rc_context(theirs):
        second = plot_accuracy({"a": [ROW]}, tmp_path / "second.png", "title")
        assert {key: matplotlib.rcParams[key] for key in theirs} == theirs
    assert np.array_equal(imread(first), imread(second))


def test_a_notebooks_backend_and_a_matplotlibrc_next_to_the_run(tmp_path):
    """matplotlib reads both when it is imported; a notebook's backend is unknown outside the notebook."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: nonsense\n")
    program = """
import os
from pathlib import Path
from titans_pt.tools.plots import plot_accuracy
plot_accuracy({"a": [{"length": 1, "mean": 0.5, "low": 0.1, "high": 0.9}]}, Path("a.png"), "title")
assert os.environ["MPLBACKEND"].startswith("module://")
"""
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").is_file()


def test_every_function_that_draws_has_our_style():
    found = 0
    for path in Path(titans_pt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and " = new_figure(" in (body := ast.unparse(node)):
                found += 1
                assert body.startswith("@own_style()"), f"{path}: {node.name}"
    assert found >= 10


@pytest.fixture
def fonts(tmp_path, monkeypatch):
    """A font with one Chinese character; all others are matplotlib's own."""
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "middle"])
    builder.setupCharacterMap({ord("\u4e2d"): "middle"})
    pen = TTGlyphPen(None)
    for point in ((0, 0), (0, 800), (800, 800), (800, 0)):
        (pen.lineTo if point != (0, 0) else pen.moveTo)(point)
    pen.closePath()
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "middle": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "middle": (1000, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "One Character", "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(tmp_path / "one.ttf")
    own = [entry for entry in font_manager.fontManager.ttflist if entry.name.startswith(("DejaVu", "Last Resort"))]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "one.ttf")])
    plots._fallbacks.cache_clear()
    plots._tell_lost.cache_clear()
    yield
    plots._fallbacks.cache_clear()


def test_other_scripts_take_an_installed_font(fonts, saved, tmp_path, recwarn, capfd):
    plot_accuracy({"a": [ROW]}, tmp_path / "a.png", "run \u4e2d, caf\u00e9")
    assert saved[0].axes[0].title.get_fontfamily()[-1] == "One Character"
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_a_file_name_that_is_not_utf8(fonts, saved, tmp_path):
    plot_accuracy({"\udce4\udcb8\udcad": [ROW]}, tmp_path / "a.png", "run caf\udce9")
    (axes,) = saved[0].axes
    assert axes.get_title() == "run caf\ufffd"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["\u4e2d"]  # read in the C locale


def test_characters_without_a_font_are_one_line(fonts, tmp_path, recwarn, capfd):
    for _ in range(2):
        plot_accuracy({"\ud55c": [ROW]}, tmp_path / "a.png", "\u5929\u5730\u7384\u9ec4 \u4e2d\ud55c")
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "no installed font has 5 of the characters" in err and not recwarn.list


def test_a_font_that_cannot_be_read_has_no_characters(tmp_path):
    (tmp_path / "damaged.ttf").write_bytes(b"cut")
    assert plots._covered(str(tmp_path / "damaged.ttf")) == frozenset()
