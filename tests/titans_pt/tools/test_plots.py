"""What all figures share."""

from matplotlib.image import imread

from titans_pt.tools.plots import plot_accuracy


def test_accuracy_of_several_lines(tmp_path):
    row = {"mean": 0.5, "low": 0.1, "high": 0.9}
    lines = {name: [{"length": n, **row} for n in (1024, 2**20)] for name in ("a", "b")}
    path = plot_accuracy(lines, tmp_path / "accuracy.png", "title")
    assert imread(path).std() > 0.05 and list(tmp_path.iterdir()) == [path]
