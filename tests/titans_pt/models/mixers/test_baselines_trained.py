"""All baselines as blocks of one model, and RMT, trained in real processes: tensor ranks, ZeRO, a resume."""

import json

import pytest

from tests.conftest import TINY, merged
from tests.helpers.mixers import BASELINES, own_settings
from tests.helpers.processes import curve, run_jobs
from titans_pt.runs import checkpoints

pytestmark = pytest.mark.slow  # test_contract.py and test_split.py test each part

STOPPED, ZERO = "train.stop_at=2", "parallel.zero_stage=3"
RMT = ["model.mixers=[rmt]", "model.n_layers=2", "model.rmt={segment: 5, memory_tokens: 2}"]
SPLIT = ["parallel.tensor=2", "parallel.zero_stage=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared):
    """Run folders of one process, and of two tensor ranks under ZeRO 2, uninterrupted and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
    model = own_settings(BASELINES) | {"mixers": BASELINES, "n_layers": len(BASELINES) + 1}  # two blocks of the first
    config = folder / "config.json"  # JSON is YAML
    config.write_text(json.dumps(merged(TINY, {
        "data": {"dir": str(prepared), "sources": [source]}, "model": model, "train": {"max_steps": 4},
    })))  # fmt: skip
    run_jobs(1, config, folder, {"one": []})
    run_jobs(2, config, folder, {"tensor": SPLIT, "parts@1": [*SPLIT, STOPPED], "parts@2": SPLIT})
    return folder


@pytest.fixture(scope="module")
def more(runs):
    run_jobs(1, runs / "config.json", runs, {"rmt": RMT})
    run_jobs(2, runs / "config.json", runs, {"one-zero3": [ZERO], "rmt-zero3": [*RMT, ZERO]})
    return runs


@pytest.mark.parametrize(("one", "other"), [("one", "one-zero3"), ("rmt", "rmt-zero3")])
def test_losses_under_zero_3_are_those_of_one_process(more, one, other):
    test_losses_are_those_of_one_process(more, one, other)


def test_losses_are_those_of_one_process(runs, one="one", other="tensor"):
    expected, found = (curve(runs / name, "loss", "grad_norm") for name in (one, other))
    assert len(expected) == 4 and expected[-1][1] < expected[0][1]
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def test_a_resume_continues_bit_for_bit(runs):
    assert curve(runs / "parts", "loss", "grad_norm") == curve(runs / "tensor", "loss", "grad_norm")
    whole, parts = (checkpoints.checkpoint_path(runs / name / "checkpoints", 4) for name in ("tensor", "parts"))
    for name in (checkpoints.MODEL, checkpoints.OPTIMIZER):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
