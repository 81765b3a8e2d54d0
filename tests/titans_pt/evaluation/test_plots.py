"""The figures: any number of rows, and something on them."""

import pytest
from matplotlib.image import imread

from titans_pt.evaluation import plots


@pytest.mark.parametrize("lengths, depths", [([512], [50]), ([2**i for i in range(11, 21)], range(0, 101, 10))])
def test_heat_map_of_any_size(tmp_path, lengths, depths):
    cells = [{"length": x, "depth": y, "mean": y / 100, "n": 5} for x in lengths for y in depths]
    picture = imread(plots.plot_heat(cells, tmp_path / "n.png", "title"))
    assert picture.shape[0] > 300 and picture.shape[1] > 600 and picture.std() > 0.1


def test_heat_map_with_holes(tmp_path):
    cells = [{"length": x, "depth": y, "mean": 1.0, "n": 1} for x, y in ((512, 0), (1024, 100))]
    assert imread(plots.plot_heat(cells, tmp_path / "n.png", "title")).std() > 0.1


def test_position_plot_of_one_bucket(tmp_path):
    rows = [{"first": 1, "last": 1, "mean": 2.0, "n": 1, "stderr": None}]
    summary = {"positions": rows, "unigram_loss": 3.0, "frozen": [{"after": 0, "positions": rows}]}
    assert imread(plots.plot_positions(summary, tmp_path / "p.png", "title")).std() > 0.05


def test_cost_of_several_lines(tmp_path):
    row = {"prefill_tokens_per_s": 1e3, "peak_memory": 2**20}
    lines = {name: [{"length": n, **row} for n in (1024, 2**20)] for name in ("a", "b")}
    assert imread(plots.plot_cost(lines, tmp_path / "cost.png", "title")).std() > 0.05
