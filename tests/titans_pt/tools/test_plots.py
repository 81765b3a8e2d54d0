"""What all figures share."""

import subprocess
import sys

from matplotlib.image import imread

from titans_pt.tools.plots import plot_accuracy


def test_accuracy_of_several_lines(tmp_path):
    row = {"mean": 0.5, "low": 0.1, "high": 0.9}
    lines = {name: [{"length": n, **row} for n in (1024, 2**20)] for name in ("a", "b")}
    path = plot_accuracy(lines, tmp_path / "accuracy.png", "title")
    assert imread(path).std() > 0.05 and list(tmp_path.iterdir()) == [path]


def test_tools_import_neither_torch_nor_matplotlib():
    names = ", ".join(f"titans_pt.tools.{name}" for name in ("files", "plots", "records", "statistics"))
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
