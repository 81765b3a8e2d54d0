"""Table 3: its runs, and what is found in their records."""

from pathlib import Path

from titans_pt.reproduce.order import Order
from titans_pt.reproduce.reproduce import by_data, planned
from titans_pt.reproduce.studies import study


def test_runs_of_the_sizes():
    asked, runs = planned(study("table3", "tiny"), Order(Path("out")))
    assert len({run.cost.parameters for run in runs}) > 1
    assert max(run.cost.parameters for run in runs) < 1.01 * min(run.cost.parameters for run in runs), "equal size"
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
