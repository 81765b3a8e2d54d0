"""train.trainable: parameters that it does not name stay the same, however ranks share the work."""

import json

import pytest
import torch

from tests.helpers.processes import run_jobs
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config import ModelConfig
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.models.mixers import MIXERS
from titans_pt.models.mixers.lmm import LMM
from titans_pt.runs import checkpoints
from titans_pt.runs.checkpoints import Tensors
from titans_pt.runs.metrics import read_metrics
from titans_pt.runs.tools import merge_run
from titans_pt.tasks import task_of
from titans_pt.training import loop
from titans_pt.training.plan import make_plan

PATTERNS = ["*.memory.*", "norm.weight"]
TRAINABLE = f"train.trainable={json.dumps(PATTERNS)}"
WAYS = {
    "data": ["parallel.zero_stage=1"],
    "tensor": ["parallel.zero_stage=2", "parallel.tensor=2", "train.checkpoint_shards=true"],
}
MORE_WAYS = {
    "sharded": ["parallel.zero_stage=3", "train.precision=bf16"],
    "data-shards": ["parallel.zero_stage=2", "train.checkpoint_shards=true"],
    "tensor-sharded": ["parallel.zero_stage=3", "parallel.tensor=2", "train.checkpoint_shards=true"],
    "context": ["parallel.zero_stage=2", "parallel.context=2"],
}
ADAPTERS = ["model.lora.rank=2", 'train.trainable=["*.lora_*"]']
ADAPTED = {"adapters-tensor": [*ADAPTERS, "parallel.zero_stage=2", "parallel.tensor=2"]}
MORE_ADAPTED = {
    "adapters-data": [*ADAPTERS, "parallel.zero_stage=1"],
    "adapters-sharded": [*ADAPTERS, "parallel.zero_stage=3"],
    "adapters-tensor-sharded": [
        *ADAPTERS, "parallel.zero_stage=3", "parallel.tensor=2", "parallel.sequence=true",
        "train.checkpoint_shards=true",
    ],
}  # fmt: skip
"""Settings for two ranks."""


@pytest.fixture(scope="module")
def source(tmp_path_factory, prepared):
    return untrained_run(tmp_path_factory.mktemp("frozen") / "source", prepared, seed=5, n_layers=2, mixers=["mal"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared, source):
    return train(tmp_path_factory.mktemp("ways"), prepared, source, WAYS | ADAPTED)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory, prepared, source):
    ways = {"data": WAYS["data"]} | MORE_WAYS | ADAPTED | MORE_ADAPTED
    return train(tmp_path_factory.mktemp("more"), prepared, source, ways)


def train(folder, prepared, source, ways):
    """Train each of ``ways``: 4 steps at once, and 2 + 2."""
    import yaml

    from tests.conftest import TINY, merged

    path = str(prepared.parent / "text.jsonl")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(merged(TINY, {
        "data": {"dir": str(prepared), "sources": [{"kind": "files", "path": path}]},
        "model": {"n_layers": 2, "mixers": ["mal"]},
        "train": {"max_steps": 4, "init_from": str(source), "trainable": PATTERNS},
    })))  # fmt: skip
    jobs = {}
    for name, way in ways.items():
        jobs |= {name: way, f"{name}-parts@1": [*way, "train.stop_at=2"], f"{name}-parts@2": way}
    run_jobs(2, config, folder, jobs)
    return folder


def read(run, step=4):
    """Read a checkpoint's weights, and the moments that it holds."""
    with Tensors(checkpoints.checkpoint_path(run / "checkpoints", step)) as tensors:
        names = tensors.shapes()
        return {name: tensors.get("weight", name) for name in names}, {
            (kind, name): tensors.get(kind, name) for name, kinds in tensors.moments().items() for kind in kinds
        }


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_rest_stays_as_it_is_and_a_resume_continues_bit_for_bit(runs, source, way):
    check(runs, source, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", MORE_WAYS)
def test_under_more_ways(more_runs, source, way):
    check(more_runs, source, way)


def check(runs, source, way):
    given, _ = read(source, 3)
    weights, moments = read(runs / way)
    named = {name for name in given if ".memory." in name or name == "norm.weight"}
    assert {name for name in given if not torch.equal(given[name], weights[name])} == named
    assert {name for _, name in moments} == named
    check_resumed(runs, way)
    assert losses(runs / way) == pytest.approx(losses(runs / "data"), abs=0.03 if way == "sharded" else 1e-4)
    merge_run(str(runs / way), None)
    assert all(torch.equal(weights[name], found) for name, found in read(runs / way)[0].items())


def check_resumed(runs, way):
    """Check that 2 + 2 steps equal 4, bit for bit."""
    for one, other in zip(read(runs / way), read(runs / f"{way}-parts"), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def losses(run):
    return [r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]


@pytest.mark.thorough
@pytest.mark.parametrize("way", ADAPTED)
def test_adapters_are_trained_beside_the_weights_of_a_run_without_them(runs, source, way):
    check_adapters(runs, source, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", MORE_ADAPTED)
def test_adapters_under_more_ways(more_runs, source, way):
    check_adapters(more_runs, source, way)
    assert losses(more_runs / way) == pytest.approx(losses(more_runs / "adapters-tensor"), abs=1e-4)


def check_adapters(runs, source, way):
    given, _ = read(source, 3)
    weights, moments = read(runs / way)
    adapters = {name for name in weights if ".lora_" in name}
    assert weights.keys() == given.keys() | adapters and len(adapters) > 2 * 14
    assert all(torch.equal(given[name], weights[name]) for name in given)
    assert {name for _, name in moments} == adapters
    assert all(weights[name].any() for name in adapters)
    check_resumed(runs, way)
    found, without = losses(runs / way), losses(runs / "data")
    assert found[0] == pytest.approx(without[0], abs=1e-5) and found[3] != pytest.approx(without[3], abs=1e-4)


@pytest.mark.parametrize("more", [['train.trainable=["*.mlp.*"]'], ADAPTERS], ids=["mlp", "adapters"])
def test_the_plan_of_tensor_ranks(tiny, more):
    """Frozen parameters that every rank holds whole, such as the memory's norm, have no gradients to sum."""
    config = tiny(model={"n_layers": 2, "mixers": ["mag"]})
    whole, plan = (make_plan(task_of(load_config(config, [*more, f"parallel.tensor={n}"])), ranks=n) for n in (1, 2))
    assert (plan.parameters, plan.trained) == (whole.parameters, whole.trained)
    assert whole.bytes["optimiser"] / 2 <= plan.bytes["optimiser"] < whole.bytes["optimiser"]


def test_the_plan_counts_adapters(tiny):
    """Each layer has (1, in) and (out, 1): q, k, v, out (16, 16), gate, up (16, 32), down (32, 16)."""
    config = tiny(model={"n_layers": 2, "mixers": ["swa"]})
    plan = make_plan(task_of(load_config(config, ["model.lora.rank=1", 'train.trainable=["*.lora_*"]'])), ranks=1)
    whole = make_plan(task_of(load_config(config)), ranks=1)
    assert plan.trained == plan.parameters - whole.parameters == 2 * (4 * 32 + 3 * 48)
    assert plan.bytes["optimiser"] == 12 * plan.trained
    assert plan.cost.flops > whole.cost.flops


def test_the_disk_that_a_plan_names_has_room_for_the_best_and_the_evaluated(tiny):
    def kept(*words: str) -> float:
        """Number of checkpoints that the plan of a training of 12 steps has room for."""
        cost = make_plan(task_of(load_config(tiny(train={"max_steps": 12, "checkpoint_every": 1000}), words)), 1).cost
        return cost.disk / cost.checkpoint

    assert kept() == 1
    assert kept("train.eval_every=4", "train.patience=9") == 4, "the last, and three that may be the best"
    assert kept("train.eval_every=2", "train.patience=9") == 4, "three newest, and the best"
    assert kept("evaluation.every=6") == 3


def test_the_plan_counts_what_is_trained(tiny, capsys):
    changes = {"model": {"n_layers": 2, "mixers": ["lmm"]}}
    whole = make_plan(task_of(load_config(tiny(**changes))), ranks=1)
    plan = make_plan(task_of(load_config(tiny(**changes), [TRAINABLE])), ranks=1)
    assert f"{plan.parameters:,} parameters ({plan.trained:,} of them trained) on" in plan.text()
    assert "trained" not in whole.text() and plan.parameters == whole.parameters == whole.trained
    assert plan.bytes["optimiser"] == 12 * plan.trained and whole.bytes["optimiser"] == 12 * whole.parameters
    assert plan.bytes["parameters"] == whole.bytes["parameters"]
    assert plan.bytes["gradients"] < whole.bytes["gradients"]
    assert whole.cost.disk - plan.cost.disk == 8 * (plan.parameters - plan.trained)  # one checkpoint
    assert cli.run(["plan", str(tiny(**changes)), 'train.trainable=["*.memory.q*","head.*"]']) == 2
    message = capsys.readouterr().err
    assert (
        "train.trainable: 'head.*' is the name of no parameter; there are embedding.weight, blocks.*.mixer" in message
    )
    assert ".1." not in message


@pytest.mark.usefixtures("one_group")
def test_another_choice_does_not_continue(tiny):
    config = tiny(train={"max_steps": 2, "warmup_steps": 0})
    assert loop.train(load_config(config, [TRAINABLE, "train.stop_at=1"])) == 0
    with pytest.raises(UserError, match=r"train.trainable: given \[\], but .* was trained with \['\*.memory.\*'"):
        loop.train(load_config(config))
    assert loop.train(load_config(config, [f"train.trainable={json.dumps(PATTERNS[::-1])}"])) == 0


class Idle(LMM):
    name = "idle"

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.usefixtures("one_group")
def test_parameters_that_change_nothing_alone(tiny, monkeypatch):
    monkeypatch.setitem(MIXERS._found, "idle", Idle)
    config = load_config(tiny(model={"mixers": ["idle"]}), ["train.trainable=['*.unused']"])
    with pytest.raises(UserError, match=r"train.trainable: given .*unused.*; the loss depends on none of these param"):
        loop.train(config)
