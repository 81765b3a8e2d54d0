"""Table 3: its runs, and the figures read from their records."""

from pathlib import Path

from titans_pt.reproduce import pictures
from titans_pt.reproduce.order import Order
from titans_pt.reproduce.reproduce import by_data, planned
from titans_pt.reproduce.studies import study

RIDGE = "ridge on the lookback"


def test_runs_of_the_sizes():
    asked, runs = planned(study("table3", "tiny"), Order(Path("out")))
    assert len({run.cost.parameters for run in runs}) > 1
    for horizon in (96, 720):
        sizes = [run.cost.parameters for run in runs if run.config.forecast["horizon"] == horizon]
        assert max(sizes) < 1.01 * min(sizes), "equal size"
    assert len({run.name for run in runs}) == len(runs) == 2 * 24, "two seeds"
    by_name = {run.name: run.config for run in runs}
    long = by_name["lmm-elecdemand-96-l720-s0"]
    assert (long.data.seq_len, long.train.batch_tokens // 720) == (720, 32), "as many windows in a step"
    wide = by_name["transformer-generation-96-s1"]
    assert (wide.forecast["series"], wide.train.decay_steps) == ("simbench-generation", 256 // 8), "halved each epoch"
    every = by_name["lmm-elecdemand-96-all-s0"]
    assert every.train.decay_steps == (12264 - 96 - 96 + 1) // 32, "all windows"
    off = next(run for run in runs if run.variant == "elecdemand-96-off")
    assert off.config.model.memory.writes is False and off.config.train.patience == 3
    asked, runs = planned(study("table3", "paper"), Order(Path("out"), models=["lmm"]))
    assert len(runs) == 7 * 4 * 2 and len(by_data(runs)) == 7, "what reads the same series is compared"
    first = runs[0].config
    assert (first.train.max_steps, first.train.decay_steps) == (10 * 264, 264), "8,449 windows, 32 a step"
    assert first.train.schedule == "halving" and first.forecast["horizon"] == 96


def test_figures_of_a_record():
    result = {
        "rows": {"model": {"mse": 0.4, "mae": 0.5, "n": 7}}, "streamed": {"n": 3, "carried": {"mse": 0.3, "mae": 0.2}},
    }  # fmt: skip
    found = {column.title: column.find(result) for column in study("table3", "tiny").columns[:-1]}
    assert (found["test MSE"].value, found["test MSE"].n) == (0.4, 7)
    assert (found["streamed: carried MSE"].value, found["streamed: carried MSE"].n) == (0.3, 3)
    assert not found["ridge MSE"] and not found["streamed: fresh MSE"]


def test_a_picture_of_each_series(tmp_path):
    def record(series, variant, seed, *errors):
        rows = {name: {"mse": sum(mse) / len(mse)} for name, mse in zip(("model", RIDGE), errors, strict=True)}
        steps = {name: [[x, x] for x in mse] for name, mse in zip(("model", RIDGE), errors, strict=True)}
        measured = {"forecast": {"series": series, "rows": rows, "steps": steps}}
        return {"model": "lmm", "variant": variant, "seed": seed, "measured": measured}

    whole, each = pictures._over_ridge(record("a", "", 0, [1.0, 3.0], [2.0, 2.0]))
    assert (whole, each) == (1.0, [0.5, 1.5]), "by rows ahead, and of all"
    shown = {
        "LMM, H = 2": [record("a", "a-2", seed, [1.0, 3.0], [2.0, 2.0]) for seed in (0, 1)],
        "LMM, H = 1": [record("a", "a-1", 0, [1.0], [2.0])],
        "LMM, b": [record("b", "b-2", 0, [1.0, 1.0], [2.0, 2.0])],
        "not measured": [{"measured": {}}],
    }
    found = pictures.forecasts(shown, tmp_path / "table3")
    assert [path.name for path in found] == ["table3-a.png", "table3-b.png"] and all(path.is_file() for path in found)
