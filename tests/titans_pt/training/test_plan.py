import re
from pathlib import Path

import pytest
import torch

from titans_pt import cli
from titans_pt.config.files import load_config, validated
from titans_pt.errors import UserError
from titans_pt.kernels.memory import chunked, dispatch
from titans_pt.models import build_model
from titans_pt.tasks import Task, task_of
from titans_pt.tasks.language import Language
from titans_pt.tasks.next_token import NextTokenLoss
from titans_pt.training import loop
from titans_pt.training.plan import GIB, _activation_bytes, _FusedNorms, _mixers, _Saved, cost_of, make_plan, unkept

SIZE = {"d_model": 64, "n_layers": 4, "n_heads": 4, "mlp_hidden": 96}


@pytest.fixture
def config(tiny):
    def load(seq_len=128, **changes):
        model = SIZE | {"memory": {"depth": 2, "chunk_size": 4, "expansion": 2}} | changes.pop("model", {})
        path = tiny(data={"seq_len": seq_len}, model=model, **{"train": {"batch_tokens": 8 * seq_len}} | changes)
        return load_config(path)

    return load


def test_the_grid_and_the_batch(config):
    plan = make_plan(task_of(config(parallel={"tensor": 2, "zero_stage": 2})), ranks=4)
    assert (plan.data, plan.micro_batch, plan.accumulation) == (2, 1, 4)
    assert "4 ranks = 2 tensor x 2 data, ZeRO 2, fp32" in plan.text()
    assert "1,024 tokens per step = 2 data ranks x 4 micro-batches x 1 samples x 128 tokens" in plan.text()
    whole = make_plan(task_of(config()), ranks=1)
    assert plan.parameters == whole.parameters == sum(p.numel() for p in build_model(config().model).parameters())
    assert plan.bytes["parameters"] < 0.6 * whole.bytes["parameters"]
    assert plan.bytes["optimiser"] < 0.3 * whole.bytes["optimiser"]
    assert plan.bytes["activations"] < 0.8 * whole.bytes["activations"]
    pieces = make_plan(task_of(config(parallel={"tensor": 2, "context": 2})), ranks=8)
    assert "8 ranks = 2 tensor x 2 context x 2 data, ZeRO 1, fp32" in pieces.text()
    assert pieces.bytes["activations"] < 0.6 * plan.bytes["activations"]
    assert pieces.bytes["optimiser"] < 0.6 * plan.bytes["optimiser"]
    three = make_plan(task_of(config(parallel={"tensor": 2, "zero_stage": 3})), ranks=4)
    assert three.bytes["parameters"] < 0.6 * plan.bytes["parameters"]


@pytest.mark.parametrize("mixer", [
    "lmm", "mac", "attention", "swa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mag", "mal")),
])  # fmt: skip
@pytest.mark.usefixtures("without_c")
def test_the_estimate_is_what_autograd_keeps(config, mixer, monkeypatch):
    """Compare an estimate, scaled up from a shorter row, with the real model on the whole row.

    The memory runs in PyTorch operators, which keep one state in every sqrt(n) of n blocks. KEEP_BYTES is 0 here: on a
    CPU the operators keep that much more where it saves time.
    """
    monkeypatch.setattr(chunked, "KEEP_BYTES", 0)
    monkeypatch.setattr(chunked, "GROUP_BYTES", 0)
    settings = config(seq_len=2048, model={"mixers": [mixer], "window": 256, "segment": 64, "memory_tokens": 32})
    model = build_model(settings.model)
    with _Saved(model) as saved:
        NextTokenLoss(model)(torch.zeros(2, 2049, dtype=torch.int64), None)
    estimate = _activation_bytes(Language(settings), 2, gpu=False)
    softmax = 2 * 4 * 2048 * settings.model.vocab_size
    assert estimate["activations"] + estimate.get("memory states", 0) + softmax == pytest.approx(saved.total, rel=0.2)


def test_memory_states_are_kept_for_every_root_of_the_blocks(config):
    settings = config(model={"mixers": ["lmm"]})
    one = 2 * 16 * 32 * 4 * 4  # two matrices, four heads, fp32
    assert _mixers(settings)["lmm"].kept_state_bytes(128) == 3 * one * 7  # every fifth of 32 blocks
    settings = config(model={"mixers": ["attention"]})
    assert _mixers(settings)["attention"].kept_state_bytes(128) == 0


BF16 = {"batch_tokens": 1024, "precision": "bf16"}


@pytest.mark.thorough
@pytest.mark.usefixtures("interpreter")
def test_a_gpu_without_one_is_what_its_kernels_keep(config, monkeypatch):
    """The estimate includes the states that the fused memory keeps; the kernels run in Triton's interpreter."""
    settings = config(
        model={"mixers": ["lmm"], "n_layers": 1, "n_heads": 2, "memory": {"depth": 2, "chunk_size": 16}}, train=BF16
    )
    monkeypatch.setattr("titans_pt.kernels.memory.fused.operators.SCRATCH_BYTES", 1 << 18)
    estimate = _activation_bytes(Language(settings), 2, gpu=True)
    monkeypatch.setattr(dispatch, "chosen", lambda *_: dispatch.TRITON)
    model = build_model(settings.model).bfloat16()
    with _FusedNorms(), _Saved(model) as saved:
        model(torch.zeros(2, 128, dtype=torch.int64), head=False, output_final_state=False)
    assert estimate["activations"] == pytest.approx(saved.total, rel=0.03)  # all but the last norm
    assert estimate["memory scratch"] == 1 << 18 and "memory states" not in estimate


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "attention", "swa"])
def test_a_gpu_keeps_less_than_a_cpu(config, mixer):
    settings = config(seq_len=512, model={
        "mixers": [mixer], "window": 128, "segment": 64, "memory_tokens": 32, "memory": {"chunk_size": 16},
    }, train=BF16)  # fmt: skip
    cpu, one, two = (_activation_bytes(Language(settings), *how) for how in ((2, False), (1, True), (2, True)))
    assert two["activations"] == pytest.approx(2 * one["activations"], rel=0.05)
    assert 0 < two["activations"] < cpu["activations"] + cpu.get("memory states", 0)


def test_what_the_kernels_do_not_serve_is_planned_as_on_a_cpu(config):
    settings = config(model={"mixers": ["lmm"], "memory": {"depth": 3}}, train=BF16)
    assert _activation_bytes(Language(settings), 1, gpu=True) == _activation_bytes(Language(settings), 1, gpu=False)


@pytest.mark.parametrize(("gpu", "device"), [(False, "CPU"), (True, "GPU")])
def test_a_plan_says_whose_memory_it_estimates(config, gpu, device):
    plan = make_plan(Language(config(model={"mixers": ["swa"]}, train=BF16)), 1, gpu=gpu)
    assert f"estimated memory per rank, on a {device}, {plan.total / 2**30:.2f} GiB" in plan.text()


def test_checkpointing_and_sequence_need_less(config):
    size = {name: make_plan(task_of(config(**changes)), ranks=2).bytes["activations"] for name, changes in {
        "plain": {}, "checkpointed": {"train": {"batch_tokens": 1024, "activation_checkpointing": True}},
        "tensor": {"parallel": {"tensor": 2}}, "sequence": {"parallel": {"tensor": 2, "sequence": True}},
    }.items()}  # fmt: skip
    assert size["checkpointed"] < 0.5 * size["plain"]
    assert size["sequence"] < size["tensor"] < size["plain"]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "told"), [(8, ""), (64, "24 programs a call .*, which keep 18% of")])
def test_serial_kernels_that_leave_a_gpu_idle_are_told(ranks, told):
    text = make_plan(task_of(load_config("170m/lmm")), ranks=ranks, gpu=False).text()
    assert bool(told) == ("programs a call" in text) and re.search(told, text)


@pytest.mark.parametrize(("here", "told"), [
    (None, ""), ("8", ""), ("4", ""),
    ("2", "parallel.tensor=4 ranks span nodes of 2 processes.*; parallel.tensor=2 stays inside"),
    ("6", "parallel.tensor=4 ranks span nodes of 6 processes.*; parallel.tensor=2 stays inside"),
])  # fmt: skip
def test_tensor_groups_that_span_nodes_are_told(config, monkeypatch, here, told):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": here or ""}.items():
        monkeypatch.setenv(name, value)
    changes = {"parallel": {"tensor": 4}, "model": {"n_heads": 4, "mlp_hidden": 64}}
    text = make_plan(task_of(config(**changes)), ranks=8).text()
    assert bool(told) == ("span nodes" in text) and re.search(told, text)


def test_what_cannot_fit_is_refused(config):
    plan = make_plan(task_of(config()), ranks=1)
    plan.check(plan.total / GIB / 0.8)
    with pytest.raises(UserError, match=r"the plan needs about .* GiB per rank, of which \w+ .* may use 90%"):
        plan.check(plan.total / GIB)
    with pytest.raises(UserError, match="parallel.tensor: given 2; must divide the number of ranks, 3; set it to 1"):
        make_plan(task_of(config(parallel={"tensor": 2})), ranks=3)
    with pytest.raises(UserError, match="--ranks: given 0; at least 1"):
        make_plan(task_of(config()), ranks=0)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_a_grid_that_does_not_fit_the_ranks_names_one_that_does(config, axis):
    """Three ranks would divide six, but neither the heads nor data.seq_len."""
    given = {"model": {"n_heads": 4, "mlp_hidden": 64}, "train": {"batch_tokens": 6 * 128}}
    with pytest.raises(UserError) as error:
        make_plan(task_of(config(**given, parallel={axis: 4})), ranks=6)
    told = re.search(f"parallel.{axis}: given 4; .*; set it to (\\d+), or start (\\d+) processes", str(error.value))
    assert make_plan(task_of(config(**given, parallel={axis: int(told[1])})), ranks=6)
    assert make_plan(task_of(config(**given, parallel={axis: 4})), ranks=int(told[2]))


@pytest.mark.usefixtures("one_group")
def test_a_training_builds_its_task_once(tmp_path, monkeypatch):
    """Plan, engine, data and checkpoints share one task."""
    made, begin = [], Task.__init__
    monkeypatch.setattr(Task, "__init__", lambda self, config: (made.append(self), begin(self, config))[1])
    words = ["train.max_steps=1", "train.warmup_steps=0", "train.batch_tokens=160", "train.micro_batch=2"]
    assert loop.train(load_config("configs/recall.yaml", [*words, f"run.dir={tmp_path}", "model.mixers=[swa]"])) == 0
    assert len(made) == 1


@pytest.mark.parametrize("changes", [
    {}, {"parallel": {"zero_stage": 3, "node_ranks": 2}}, {"train": {"micro_batch": 2, "batch_tokens": 1024}},
    {"model": {"d_model": 256, "vocab_size": 5000}, "seq_len": 16}, {"parallel": {"context": 2}},
])  # fmt: skip
def test_its_remedies_are_enough(config, changes):
    """Each setting that the refusal names is accepted with the others, and makes the plan fit."""
    changes = dict(changes)
    given = config(changes.pop("seq_len", 128), **changes)
    plan = make_plan(task_of(given), ranks=4)
    for part in (0.95, 0.6, 0.01):
        gib = part * plan.total / GIB / 0.9
        with pytest.raises(UserError) as error:
            plan.check(gib)
        assert ("; set " in str(error.value)) == (part > 0.9) or part == 0.6
        told = re.search("; set (.+), or use more ranks$", str(error.value))
        for word in told[1].split(" or ") if told else ():
            make_plan(task_of(validated(given.model_dump(mode="json"), [word])), ranks=4).check(gib)
        for word in re.findall(r"\w+\.\w+=\w+", str(error.value)):
            assert make_plan(task_of(validated(given.model_dump(mode="json"), [word])), ranks=4).total < plan.total


def test_weights_that_a_node_has_twice_are_counted(config):
    sizes = [make_plan(task_of(config(parallel={"zero_stage": 3, "node_ranks": ranks})), ranks=4).bytes["parameters"]
             for ranks in (None, 2)]  # fmt: skip
    assert sizes[1] == pytest.approx(3 * sizes[0], rel=0.01)
    with pytest.raises(UserError, match="parallel.node_ranks: given 3; must divide the number of ranks, 4"):
        make_plan(task_of(config(parallel={"zero_stage": 3, "node_ranks": 3})), ranks=4)


@pytest.mark.thorough
def test_the_page_has_the_plans_of_all_sizes():
    rows = re.findall(r"^\| (\d[\d.]*[mb]) \| (.+) \|$", Path("docs/pretraining.md").read_text(), re.M)
    assert [size for size, _ in rows] == ["170m", "340m", "400m", "760m", "1.3b"]
    for size, cells in rows:
        plans = [
            make_plan(task_of(load_config(f"{size}/{model}", words)), 8, True)
            for words, models in (([], ["lmm", "mac", "transformer"]),
                                  (["train.activation_checkpointing=true"], ["lmm", "mac"]))
            for model in models
        ]  # fmt: skip
        config = plans[0].config
        *about, rate, tokens = cells.split(" | ")[:4]
        assert list(map(int, about)) == [config.model.n_layers, config.model.d_model]
        assert float(rate) == config.train.lr and float(tokens) == round(
            config.train.max_steps * config.train.batch_tokens / 1e9
        )
        told = "\n".join(f"{size}: {plan.text()}" for plan in plans)
        assert cells.split(" | ")[4:] == [f"{plan.total / GIB:.1f}" for plan in plans], told


@pytest.mark.parametrize(("changes", "says"), [
    ({"keep_every": 6}, "checkpoints are written every 4 steps, and it keeps only one every 12 steps; set "
                        "train.keep_every=8, or train.checkpoint_every=2"),
    ({"keep_every": 21}, "keeps none up to train.max_steps=40; set train.keep_every=24, or train.checkpoint_every=1"),
    ({"keep_every": 8}, None), ({}, None), ({"keep_every": 6, "checkpoint_every": 3}, None),
])  # fmt: skip
def test_checkpoints_to_keep_that_are_never_written_are_told(config, changes, says):
    found = unkept(config(train={"max_steps": 40, "checkpoint_every": 4, "batch_tokens": 1024} | changes))
    assert [says in line for line in found] == ([True] if says else [])


def test_an_evaluation_writes_checkpoints_to_keep(config):
    train = {"keep_every": 6, "checkpoint_every": 4, "batch_tokens": 1024}
    assert unkept(config(train=train, evaluation={"every": 3})) == []


def test_the_optimisers_own_state_is_counted(config, monkeypatch):
    """Adam has two numbers per weight, Muon one per weight of a matrix, SGD without momentum none."""
    task = task_of(config())
    linear = [module for module in task.build_model().blocks.modules() if isinstance(module, torch.nn.Linear)]
    weights, matrices = make_plan(task, ranks=1).parameters, sum(module.weight.numel() for module in linear)
    assert make_plan(task, ranks=1).bytes["optimiser"] == 12 * weights
    assert cost_of(task).checkpoint == 12 * weights
    muon = task_of(config(train={"optimizer": "muon", "batch_tokens": 1024}))
    assert make_plan(muon, ranks=2).bytes["optimiser"] == pytest.approx((12 * weights - 4 * matrices) / 2, abs=8)
    assert cost_of(muon).checkpoint == 12 * weights - 4 * matrices
    monkeypatch.setattr(type(task), "optimizer", lambda task, model, device: torch.optim.SGD(model.parameters(), 1e-3))
    assert make_plan(task, ranks=1).bytes["optimiser"] == cost_of(task).checkpoint == 4 * weights


def test_the_disk_is_for_the_checkpoints_that_are_kept(config):
    train = {"max_steps": 100, "checkpoint_every": 4, "keep_last": 1, "batch_tokens": 1024}
    cost = cost_of(task_of(config(train=train | {"keep_every": 6})))
    assert cost.disk == (1 + 100 // 12) * cost.checkpoint


def test_a_plan_for_cpus_says_how_to_plan_for_gpus(tiny, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, note in (["--memory", "80"], 0), ([], 1), (["train.precision=fp32"], 0):
        assert cli.run(["plan", str(tiny(train={"precision": "bf16"})), *words]) == 0
        told = capsys.readouterr()
        assert told.err.count("this machine has no GPU, so the plan is for CPUs; --memory 80 plans for GPUs") == note
        assert ("on a CPU" in told.out) == ("--memory" not in words)
