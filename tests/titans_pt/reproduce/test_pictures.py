"""Pictures of a page: what their lines, bars and dots are."""

import pytest

from titans_pt.reproduce import pictures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn; they are also saved, which lays them out."""
    figures, save = [], pictures.save_figure
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure) or save(figure, path))
    return figures


def record(**measured):
    return {"model": "lmm", "variant": "", "seed": 0, "mixers": ["lmm"], "trained": {"curve": [], "figures": {}},
            "config": {"recall": {"pairs": 4, "distance": 8}}, "measured": measured}  # fmt: skip


def test_a_panel_of_each_labelled_set(drawn, tmp_path):
    def of(variant, accuracy):
        baselines = {"majority": {"test": {"accuracy": 0.25}}}
        return record(classes={"columns": {"test": {"mean": accuracy}}, "baselines": baselines}) | {"variant": variant}

    shown = {
        "LMM, coding, pretrained": [of("coding", 0.5), of("coding", 0.75)],
        "LMM, coding, from scratch": [of("coding-scratch", 0.5)],
        "LMM, splice, pretrained": [of("splice", 1.0)],
        "not measured": [record()],
    }
    (path,) = pictures.classes(shown, tmp_path / "table4")
    assert path.is_file() and pictures.classes({"not measured": [record()]}, tmp_path / "table4") == []
    coding, splice = drawn[0].axes
    assert (coding.get_title(), splice.get_title()) == ("coding", "splice")
    assert [bar.get_width() for bar in coding.patches] == [62.5, 50.0]
    assert [label.get_text() for label in coding.get_yticklabels()] == ["LMM, pretrained", "LMM, from scratch"]
    dots, *_, majority = coding.lines
    assert list(dots.get_xdata()) == [50.0, 75.0] and list(majority.get_xdata()) == [25.0, 25.0]


def test_a_memory_that_is_never_written_is_dotted(drawn, tmp_path):
    def places(*means):
        return [{"first": 2**n, "last": 2 ** (n + 1), "mean": mean} for n, mean in enumerate(means)]

    frozen = [{"after": 0, "positions": places(5.0, 4.5)}, {"after": 64, "positions": places(9.0, 9.0)}]
    shown = {
        "LMM": [record(long={"loss": 3.0, "positions": places(4.0, 3.0), "frozen": frozen})],
        "SWA": [record(long={"loss": 3.5, "positions": places(4.0, 3.5), "frozen": []})],
    }
    (path,) = pictures.positions(shown, tmp_path / "table1")
    loss, above = drawn[0].axes
    assert path.is_file() and loss.get_title() == "dotted: the memory is never written"
    assert [(line.get_linestyle(), list(line.get_ydata())) for line in loss.lines] == [
        ("-", [4.0, 3.0]), (":", [5.0, 4.5]), ("-", [4.0, 3.5])
    ]  # fmt: skip
    assert [list(line.get_ydata()) for line in above.lines] == [[0.0, 0.0], [0.0, 0.5]]


def test_each_seed_of_recall_is_a_dot(drawn, tmp_path):
    def of(*means):
        rows = {by: [{by: 2**n, "mean": mean} for n, mean in enumerate(means, 1)] for by in ("pairs", "distance")}
        return record(recall={f"by_{by}": found for by, found in rows.items()})

    pictures.recall({"LMM": [of(1.0, 0.5), of(0.5, 0.25)]}, tmp_path / "recall")
    _, _, distance = drawn[0].axes
    mean, dots, _ = distance.lines
    assert list(mean.get_ydata()) == [75.0, 37.5] and sorted(dots.get_ydata()) == [25.0, 50.0, 50.0, 100.0]


def test_runs_without_a_curve_have_no_picture(tmp_path):
    assert pictures.training({"LMM": [record()]}, tmp_path / "table1") == []
