"""A task's own optimiser: the updates of a plain loop, under every layout, and resumed bit for bit."""

from pathlib import Path

import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.data_pipeline import Loader
from titans_pt.models.backbone import parameter_groups
from titans_pt.runs import checkpoints
from titans_pt.tasks import TASKS, task_of
from titans_pt.tasks.language import Language
from titans_pt.training import loop
from titans_pt.training.engine import Engine

pytestmark = pytest.mark.usefixtures("one_group")
HERE = ".".join(Path(__file__).with_suffix("").parts[-4:])  # tests.titans_pt.training.test_optimizers


def rmsprop(model, lr: float) -> torch.optim.Optimizer:
    """With other state than AdamW's, and twice the rate for what does not decay. With a smaller eps, gradients that
    are rounding errors would make whole steps."""
    decay, keep = parameter_groups(model, 0.1)
    return torch.optim.RMSprop([decay, keep | {"lr_scale": 2.0}], lr=lr, momentum=0.9, eps=1e-3)


@TASKS.register
class ByRMSprop(Language):
    name = "by_rmsprop"

    def optimizer(self, model, device):
        return rmsprop(model, self.config.train.lr)


@TASKS.register
class BySGD(Language):
    name = "by_sgd"  # an optimiser without state

    def optimizer(self, model, device):
        return torch.optim.SGD(parameter_groups(model, 0.0), lr=self.config.train.lr)


@TASKS.register
class ByNAdam(Language):
    name = "by_nadam"  # a product of its rates is part of the state

    def optimizer(self, model, device):
        return torch.optim.NAdam(parameter_groups(model, 0.0), lr=self.config.train.lr)


class Averaging(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


@TASKS.register
class ByAveraging(Language):
    name = "by_averaging"  # a count in its parameter groups

    def optimizer(self, model, device):
        return Averaging(parameter_groups(model, 0.0), lr=self.config.train.lr)


@pytest.fixture
def config(tiny):
    return tiny(run={"imports": [HERE]}, model={"mixers": ["lmm"]}, train={"checkpoint_every": 2, "lr": 3e-3})


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_its_updates_are_those_of_a_plain_loop(config, ranks, zero_stage):
    chosen = ["task=by_rmsprop", f"parallel.zero_stage={zero_stage}", "train.clip=1e9", "train.micro_batch=4"]
    task = task_of(load_config(config, chosen))
    torch.manual_seed(0)
    engine, plain = Engine(task, task.build_model(), ranks), task.build_model()
    weights = {}
    engine.gather(lambda kind, name, tensor: weights.setdefault((kind, name), tensor.clone()))
    for name, p in plain.named_parameters():
        p.data.copy_(weights["weight", name])
    objective, optimizer = task.objective(plain, engine.topology.tensor), rmsprop(plain, 1e-3)
    optimizer.param_groups[1]["lr"] = 2e-3
    engine.set_lr(1e-3)
    loader = Loader(task.open().train, 4, 0, 1, 4)
    batches = [task.to_device(batch, ranks.device) for position in (0, 4, 8) for batch in loader.batches(position)]
    assert engine.accumulation == 1
    for batch in batches:
        engine.micro_step(batch)
        optimizer.zero_grad()
        objective(*batch).backward()
        optimizer.step()
    found = {}
    engine.gather(lambda kind, name, tensor: found.setdefault((kind, name), tensor.clone()))
    assert {kind for kind, _ in found} == {"weight", "square_avg", "momentum_buffer"}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found["weight", name], p.detach(), rtol=1e-4, atol=1e-6)
        for kind in ("square_avg", "momentum_buffer"):
            torch.testing.assert_close(found[kind, name], optimizer.state[p][kind], rtol=1e-3, atol=1e-7, msg=name)
    assert engine.updates == 3


@pytest.mark.thorough
def test_under_every_layout_and_resumed_bit_for_bit(config, tmp_path):
    """Whole checkpoints and shards, read by other ranks than wrote them."""
    chosen = ["task=by_rmsprop", "train.max_steps=4"]
    run_jobs(1, config, tmp_path, {"whole": chosen, "parts@1": [*chosen, "train.stop_at=2"], "parts@2": chosen,
                                   "begun": [*chosen, "train.stop_at=2"]})  # fmt: skip
    layouts = {"tensor": ["parallel.tensor=2"], "data": ["parallel.zero_stage=2"], "sharded": ["parallel.zero_stage=3"]}
    jobs = {}
    for name, way in layouts.items():
        way = [*chosen, *way, "train.checkpoint_shards=true"]
        jobs |= {name: way, f"{name}-parts@1": [*way, "train.stop_at=2"], f"{name}-parts@2": way}
    run_jobs(2, config, tmp_path, jobs | {"begun": [*chosen, "parallel.tensor=2"]})

    def state(run: str) -> dict[str, torch.Tensor]:
        with checkpoints.Tensors(checkpoints.checkpoint_path(tmp_path / run / "checkpoints", 4)) as tensors:
            kinds = {name: ("weight", *kinds) for name, kinds in tensors.moments().items()}
            assert set(kinds.values()) == {("weight", "momentum_buffer", "square_avg")}
            return {f"{kind} {name}": tensors.get(kind, name) for name, each in kinds.items() for kind in each}

    whole = state("whole")
    for run in ("parts", *(f"{name}-parts" for name in layouts)):
        other = state(run.removesuffix("-parts") if run != "parts" else "whole")
        assert all(torch.equal(tensor, other[name]) for name, tensor in state(run).items()), run
    for run in (*layouts, "begun"):
        for name, tensor in state(run).items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-5, msg=f"{run}: {name}")
    for name in layouts:
        for a, b in zip(curve(tmp_path / "whole", "loss"), curve(tmp_path / name, "loss"), strict=True):
            assert b == pytest.approx(a, rel=1e-4)


def test_an_optimiser_without_state_resumes(config, tmp_path):
    def train(run: str, *ends: int) -> dict[str, torch.Tensor]:
        for end in ends:
            chosen = ["task=by_sgd", f"run.dir={tmp_path / run}", f"train.stop_at={end}"]
            assert loop.train(load_config(config, chosen)) == 0
        return checkpoints.read_weights(checkpoints.checkpoint_path(tmp_path / run / "checkpoints", ends[-1]))

    whole, parts = train("whole", 4), train("parts", 2, 4)
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_state_that_no_checkpoint_would_hold_is_refused(config, capsys):
    for task, key in {"by_nadam": "mu_product", "by_averaging": "seen"}.items():
        assert cli.run(["train", str(config), f"task={task}"]) == 2
        assert f"the optimiser of {task} keeps {key}, which are not numbers per weight" in capsys.readouterr().err


def test_a_checkpoint_of_another_optimiser_is_refused(config, capsys, monkeypatch):
    chosen = ["train", str(config), "task=by_rmsprop"]
    assert cli.run([*chosen, "train.stop_at=2"]) == 0
    monkeypatch.setattr(ByRMSprop, "optimizer", Language.optimizer)
    assert cli.run(chosen) == 2
    assert "the optimiser of by_rmsprop keeps exp_avg, exp_avg_sq of embedding.weight, and the checkpoint has " \
           "momentum_buffer, square_avg; put the optimiser back" in capsys.readouterr().err  # fmt: skip
