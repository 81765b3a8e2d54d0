"""What all figures share."""

import pytest
from matplotlib.image import imread

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
