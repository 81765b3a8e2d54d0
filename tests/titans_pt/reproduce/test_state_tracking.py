"""The study of state tracking: its runs, its figures and its picture."""

from pathlib import Path

import pytest

from titans_pt.errors import UserError
from titans_pt.reproduce import pictures
from titans_pt.reproduce.order import Order
from titans_pt.reproduce.reproduce import by_data, planned
from titans_pt.reproduce.studies import study


def test_models_of_equal_size_with_the_settings_of_their_names():
    _, runs = planned(study("statetracking", "tiny"), Order(Path("out"), seeds=[0]))
    sizes = {run.cost.parameters for run in runs}
    assert max(sizes) < 1.006 * min(sizes), "equal size"
    assert len(by_data(runs)) == 3, "what has the same problem is compared"
    by_name = {run.name: run.config for run in runs}
    for name, settings in {
        "lmm-parity-s0": (16, 2, True, True, None), "lmm-parity-c1-half-s0": (1, 2, True, True, 0.5),
        "lmm-S3-linear-c1-one-still-s0": (1, 1, False, False, 1.0),
    }.items():  # fmt: skip
        memory = by_name[name].model.memory
        found = memory.chunk_size, memory.depth, memory.norm, memory.momentum, memory.step_bound
        assert found == settings, name
    assert by_name["deltanet-parity-negative-s0"].model.deltanet["allow_neg_eigval"] is True
    for name, hidden, rule, caches in (
        ("dgd", 148, "dgd", None),
        ("omega-16", 137, "omega", None),
        ("caching", 127, "titans", 8),
    ):
        model = by_name[f"lmm-parity-c1-one-{name}-s0"].model
        found = model.mlp_hidden, model.memory.rule, model.memory.caching and model.memory.caching.slots
        assert (*found, model.memory.step_bound) == (hidden, rule, caches, 1.0), name
    slow, two = by_name["deltanet-parity-negative-slow-s0"], by_name["deltanet-S3-negative-two-s0"]
    assert (slow.train.lr, slow.model.deltanet["allow_neg_eigval"]) == (2e-3, True)
    assert (two.state_tracking["tokens"], two.data.seq_len, two.train.lr) == (2, 80, 4e-3)
    assert (by_name["lmm-A5-c1-one-s0"].state_tracking["problem"], by_name["lmm-A5-c1-one-s0"].train.max_steps) == (
        "A5",
        2000,
    )


def test_one_size():
    with pytest.raises(UserError, match="--size: given '170m'; statetracking has models of one size: tiny"):
        study("statetracking", "170m")


def _record(problem: str, accuracy: float) -> dict:
    rows = [{"length": n, "mean": accuracy, "n": 256} for n in (32, 512)]
    return {"model": "lmm", "config": {"state_tracking": {"problem": problem}},
            "measured": {"states": {"by_length": rows, "chance": 0.5}}}  # fmt: skip


def test_figures_of_a_record():
    columns = {column.title: column.find for column in study("statetracking", "tiny").columns}
    found = columns["last of 512 (%)"](_record("parity", 0.75)["measured"]["states"])
    assert (found.kind, found.value, found.n) == ("accuracy", 0.75, 256)
    assert columns["last of 64 (%)"](_record("parity", 0.75)["measured"]["states"]) is None
    trained = {"figures": {"whole": [[100, 0.5], [200, 0.99], [300, 1.0]], "accuracy": [[100, 0.995]]}}
    assert columns["tokens to 99 % of samples"](trained).value == 200


def test_a_panel_for_each_problem(tmp_path):
    shown = {"LMM, parity": [_record("parity", 0.9), _record("parity", 0.8)], "LMM, S3": [_record("S3", 0.2)]}
    (path,) = pictures.states(shown, tmp_path / "a")
    assert path.name == "a-lengths.png" and path.stat().st_size > 1000
    assert pictures.states({"LMM, parity": [{"model": "lmm", "measured": {}}]}, tmp_path / "b") == []
