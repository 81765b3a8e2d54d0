"""Muon, and optimisers of a task's own: a plain loop's updates, under every layout, resumed bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.processes import curve, run_jobs
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.data_pipeline import Loader
from titans_pt.errors import UserError
from titans_pt.models.backbone import parameter_groups
from titans_pt.runs import checkpoints
from titans_pt.tasks import TASKS, task_of
from titans_pt.tasks.language import Language
from titans_pt.training import loop
from titans_pt.training.engine import Engine
from titans_pt.training.plan import cost_of

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


def side_by_side(task, ranks, optimizers) -> tuple[dict[str, dict[str, torch.Tensor]], nn.Module]:
    """Three steps by the engine, and by a plain loop with ``optimizers(model)``; each step at 1e-3.

    Returns:
        The engine's tensors, name -> kind -> tensor; the model of the plain loop.
    """
    torch.manual_seed(0)
    engine, plain = Engine(task, task.build_model(), ranks), task.build_model().to(ranks.device)
    assert engine.accumulation == 1

    def tensors() -> dict[str, dict[str, torch.Tensor]]:
        found = {}
        for kind, name, tensor in engine.masters.gather():
            found.setdefault(name, {})[kind] = tensor.clone()
        return found

    for name, kinds in tensors().items():
        plain.get_parameter(name).data.copy_(kinds["weight"])
    objective, made = task.objective(plain, engine.topology.tensor), optimizers(plain)
    engine.set_lr(1e-3)
    loader = Loader(task.open().train, 4, 0, 1, 4)
    for position in (0, 4, 8):
        for batch in loader.batches(position):
            batch = task.to_device(batch, ranks.device)
            engine.micro_step(batch)
            plain.zero_grad()
            objective(*batch).backward()
            for optimizer in made:
                optimizer.step()
    assert engine.masters.updates == 3
    return tensors(), plain


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_tasks_own_makes_the_updates_of_a_plain_loop(config, ranks, zero_stage):
    chosen = ["task=by_rmsprop", f"parallel.zero_stage={zero_stage}", "train.clip=1e9", "train.micro_batch=4"]
    made = []

    def optimizers(model):
        made.append(rmsprop(model, 1e-3))
        made[0].param_groups[1]["lr"] = 2e-3
        return made

    found, plain = side_by_side(task_of(load_config(config, chosen)), ranks, optimizers)
    for name, p in plain.named_parameters():
        assert set(found[name]) == {"weight", "square_avg", "momentum_buffer"}
        torch.testing.assert_close(found[name]["weight"], p.detach(), rtol=1e-4, atol=1e-6)
        for kind in ("square_avg", "momentum_buffer"):
            torch.testing.assert_close(found[name][kind], made[0].state[p][kind], rtol=1e-3, atol=1e-7, msg=name)


@pytest.mark.parametrize("zero_stage", [1, pytest.param(1, marks=pytest.mark.gpu, id="1-gpu"), 2])
def test_muon_is_torchs(config, ranks, zero_stage):
    """torch.optim.Muon for the matrices (its products are bf16), AdamW for the rest, which are the same to rounding."""
    chosen = ["train.optimizer=muon", f"parallel.zero_stage={zero_stage}", "train.clip=1e9", "train.micro_batch=4"]
    matrices = set()

    def optimizers(model):
        for name, module in model.blocks.named_modules():
            if isinstance(module, nn.Linear):
                matrices.add(f"blocks.{name}.weight")
        names = {id(p): name for name, p in model.named_parameters()}
        groups = parameter_groups(model, 0.1)
        rest = [g | {"params": [p for p in g["params"] if names[id(p)] not in matrices]} for g in groups]
        muon = torch.optim.Muon([model.get_parameter(name) for name in matrices], lr=1e-3, momentum=0.95,
                                weight_decay=0.1, adjust_lr_fn="match_rms_adamw")  # fmt: skip
        return muon, torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95))

    task = task_of(load_config(config, chosen))
    found, plain = side_by_side(task, ranks, optimizers)
    torch.manual_seed(0)
    start = task.build_model().to(ranks.device)
    assert {name for name in found if "momentum_buffer" in found[name]} == matrices
    assert "blocks.0.mixer.memory.gates.linear.weight" in matrices and "embedding.weight" not in matrices
    for name, p in plain.named_parameters():
        ours, theirs = (w - start.get_parameter(name).detach() for w in (found[name]["weight"], p.detach()))
        assert float((ours - theirs).norm()) < (0.03 if name in matrices else 1e-3) * float(theirs.norm()), name
        assert set(found[name]) == {"weight"} | ({"momentum_buffer"} if name in matrices else {"exp_avg", "exp_avg_sq"})


LAYOUTS = {
    "data": ["parallel.zero_stage=2"], "tensor": ["parallel.tensor=2"], "sharded": ["parallel.zero_stage=3"],
    "context": ["parallel.context=2"], "bf16": ["train.precision=bf16"],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("chosen", "layouts"), [
    (["task=by_rmsprop"], ["data", "tensor", "sharded"]),
    (["train.optimizer=muon"], ["data", "tensor", "context", "bf16"]),
], ids=["own", "muon"])  # fmt: skip
def test_under_every_layout_and_resumed_bit_for_bit(config, tmp_path, chosen, layouts):
    """Whole checkpoints and shards, read by other ranks than wrote them."""
    chosen = [*chosen, "train.max_steps=4"]
    run_jobs(1, config, tmp_path, {"whole": chosen, "parts@1": [*chosen, "train.stop_at=2"], "parts@2": chosen,
                                   "begun": [*chosen, "train.stop_at=2"]})  # fmt: skip
    jobs = {}
    for name in layouts:
        way = [*chosen, *LAYOUTS[name], "train.checkpoint_shards=true"]
        jobs |= {name: way, f"{name}-parts@1": [*way, "train.stop_at=2"], f"{name}-parts@2": way}
    run_jobs(2, config, tmp_path, jobs | {"begun": [*chosen, "parallel.tensor=2"]})
    whole = state(tmp_path / "whole")
    for run in ("parts", *(f"{name}-parts" for name in layouts)):
        other = state(tmp_path / run.removesuffix("-parts")) if run != "parts" else whole
        assert all(torch.equal(tensor, other[name]) for name, tensor in state(tmp_path / run).items()), run
    for run in ("begun", *(name for name in layouts if name != "bf16")):
        for name, tensor in state(tmp_path / run).items():
            torch.testing.assert_close(tensor, whole[name], rtol=2e-3, atol=1e-5, msg=f"{run}: {name}")
    for name in layouts:
        for a, b in zip(curve(tmp_path / "whole", "loss"), curve(tmp_path / name, "loss"), strict=True):
            assert b == pytest.approx(a, rel=3e-2 if name == "bf16" else 1e-4)


@pytest.mark.thorough
def test_muon_of_matrices_that_lie_across_ranks(config, tmp_path):
    """One matrix over four ranks; all matrices over four ranks, and over two times two."""
    one = ["train.trainable=[blocks.0.mlp.down.weight]"]
    chosen = ["train.optimizer=muon", "train.max_steps=4"]
    run_jobs(1, config, tmp_path, {"one-whole": [*chosen, *one], "all-whole": chosen})
    tensor = ["parallel.tensor=2"]
    jobs = {"one-data": one, "all-data": [], "one-tensor": [*one, *tensor], "all-tensor": tensor}
    run_jobs(4, config, tmp_path, {name: [*chosen, *more] for name, more in jobs.items()})
    for name in jobs:
        whole = state(tmp_path / f"{name[:3]}-whole")
        for key, tensor in state(tmp_path / name).items():
            torch.testing.assert_close(tensor, whole[key], rtol=2e-3, atol=1e-5, msg=f"{name}: {key}")


def state(run: Path) -> dict[str, torch.Tensor]:
    """Weights and the optimiser's state after four steps."""
    with checkpoints.Tensors(checkpoints.checkpoint_path(run / "checkpoints", 4)) as tensors:
        kinds = {name: ("weight", *kinds) for name, kinds in tensors.moments().items()}
        return {f"{kind} {name}": tensors.get(kind, name) for name, each in kinds.items() for kind in each}


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


def scaled(model, optimizer, **options) -> torch.optim.Optimizer:
    """Groups with and without decay, at half the rate."""
    return optimizer([group | {"lr_scale": 0.5} for group in parameter_groups(model, 0.1)], lr=1e-3, **options)


class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Counting(torch.optim.SGD):
    seen = 0

    def step(self, closure=None):
        self.seen += 1
        return super().step(closure)


REFUSED = {
    "adafactor": (lambda m: scaled(m, torch.optim.Adafactor), "does not treat every weight by itself"),
    "clipping": (lambda m: scaled(m, Clipping), "does not treat every weight by itself"),
    "counting": (lambda m: scaled(m, Counting), "keeps seen, which are not numbers per weight"),
    "asgd": (lambda m: scaled(m, torch.optim.ASGD), "keeps eta, mu, which are not numbers per weight"),
    "rprop": (lambda m: scaled(m, torch.optim.Rprop), "treats its first update in a special way"),
    "dampening": (lambda m: scaled(m, torch.optim.SGD, momentum=0.9, dampening=0.5), "its first update in a special"),
    "adagrad": (lambda m: scaled(m, torch.optim.Adagrad), "has state before its first update"),
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), "cannot update flat pieces of the weights: TypeError: "),
    "sparse": (lambda m: torch.optim.SparseAdam(m.parameters()), "RuntimeError: SparseAdam does not support dense"),
    "muon": (lambda m: torch.optim.Muon([m.blocks[0].mlp.down.weight]), "trained parameters, such as embedding.weight"),
    "twice": (lambda m: torch.optim.SGD([*m.parameters(), m.norm.weight], lr=0.1), "holds norm.weight 2 times"),
    "foreign": (lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(m.norm.weight)], lr=0.1), "holds 1 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_optimisers_that_zero_cannot_use_are_refused(config, monkeypatch, case):
    make, told = REFUSED[case]
    monkeypatch.setattr(ByRMSprop, "optimizer", lambda self, model, device: make(model))
    task = task_of(load_config(config, ["task=by_rmsprop"]))
    with pytest.raises(UserError, match=f"^task: the optimiser of by_rmsprop .*{told}"):
        cost_of(task)


def test_options_of_torchs_own(config, tmp_path, monkeypatch):
    """A fused AdamW with a third moment, a group of frozen parameters and an empty one; its plan, and a training."""

    def make(self, model, device):
        frozen = [p for p in model.parameters() if not p.requires_grad]
        groups = [*parameter_groups(model, 0.1), {"params": frozen}, {"params": []}]
        return torch.optim.AdamW(groups, lr=torch.tensor(1e-3), fused=True, amsgrad=True)

    monkeypatch.setattr(ByRMSprop, "optimizer", make)
    chosen = ["task=by_rmsprop", "train.trainable=[blocks.*]", "train.stop_at=2"]
    assert loop.train(load_config(config, chosen)) == 0
    with checkpoints.Tensors(checkpoints.checkpoint_path(tmp_path / "run" / "checkpoints", 2)) as tensors:
        held = tensors.moments()
    assert held["embedding.weight"] == ()
    assert held["blocks.0.mlp.down.weight"] == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def test_a_checkpoint_of_another_optimiser_is_refused(config, capsys, monkeypatch):
    chosen = ["train", str(config), "task=by_rmsprop"]
    assert cli.run([*chosen, "train.stop_at=2"]) == 0
    monkeypatch.setattr(ByRMSprop, "optimizer", Language.optimizer)
    assert cli.run(chosen) == 2
    assert "the optimiser of by_rmsprop keeps exp_avg, exp_avg_sq of embedding.weight, and the checkpoint has " \
           "momentum_buffer, square_avg; put the optimiser back" in capsys.readouterr().err  # fmt: skip


def test_a_run_keeps_its_optimiser(config, capsys):
    assert cli.run(["train", str(config), "train.stop_at=2"]) == 0
    assert cli.run(["train", str(config), "train.optimizer=muon"]) == 2
    assert "train.optimizer: given 'muon', but " in (error := capsys.readouterr().err)
    assert "was trained with 'adamw', and has its state; put it back" in error


def test_muon_under_zero_3_is_refused(config, capsys):
    assert cli.run(["train", str(config), "train.optimizer=muon", "parallel.zero_stage=3"]) == 2
    assert "parallel.zero_stage: given 3; at most 2 with train.optimizer=muon" in capsys.readouterr().err
