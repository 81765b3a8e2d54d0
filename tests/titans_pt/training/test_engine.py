import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tests.helpers.processes import run
from titans_pt.config import ModelConfig
from titans_pt.config.files import load_config
from titans_pt.data_pipeline import Loader
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.models.backbone import parameter_groups
from titans_pt.runs import checkpoints
from titans_pt.tasks import TASKS, Task, task_of
from titans_pt.training import loop
from titans_pt.training.engine import Engine, check_node_ranks, deepspeed_config, local_batch


@pytest.mark.parametrize(("samples", "micro", "world", "expected"), [
    (8, 2, 1, (2, 4)), (8, 2, 2, (2, 2)), (8, 4, 4, (2, 1)), (6, 3, 2, (3, 1)),
])  # fmt: skip
def test_a_batch_splits_over_ranks_and_micro_batches(tiny, samples, micro, world, expected):
    config = load_config(tiny(train={"batch_tokens": 16 * samples, "micro_batch": micro}))
    assert local_batch(config, world) == expected


@pytest.mark.parametrize(("samples", "micro", "world", "message"), [
    (4, 1, 3, "train.batch_tokens: given 64 = 4 samples .* multiple of 3 data ranks x 16, e.g. 96$"),
    (128, 1, 1024, "multiple of 1024 data ranks x 16, e.g. 16384; 128 data ranks can share .* parallel.context 8-fold"),
    (10, 4, 1, "train.micro_batch: given 4; must divide the 10 samples .* e.g. 2"),
])  # fmt: skip
def test_a_batch_that_does_not_split_says_what_would(tiny, samples, micro, world, message):
    config = load_config(tiny(train={"batch_tokens": 16 * samples, "micro_batch": micro}))
    with pytest.raises(UserError, match=message):
        local_batch(config, world)


def test_norms_and_biases_do_not_decay():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "output_norm": nn.LayerNorm(2), "linear": nn.Linear(2, 2)})
    model.norm_weight, model.no_decay = nn.Parameter(torch.ones(2, 2)), ("norm_weight",)  # one row per head
    decay, keep = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decay["params"]} == {"embedding.weight", "linear.weight"}
    assert {names[id(p)] for p in keep["params"]} == {
        "norm_weight",
        "output_norm.weight",
        "output_norm.bias",
        "linear.bias",
    }
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)


def test_deepspeed_settings_follow_the_tree(tiny):
    config = load_config(tiny(train={"precision": "bf16", "clip": 0.5}, parallel={"zero_stage": 2}))
    settings = deepspeed_config(config, 3, 4, 1000)
    assert settings["bf16"] == {"enabled": True}
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000, "parameter_alignment": True}
    assert deepspeed_config(config, 3, 4, 10**9)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert (settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]) == (3, 4)


@pytest.mark.thorough
def test_a_start_does_not_wait_for_the_compiler(tiny):
    """DeepSpeed compiles a function of its Muon when ZeRO starts, and torch's imports for it take seconds."""
    program = """
import sys
from titans_pt.config.files import load_config
from titans_pt.training import loop
loop.train(load_config(sys.argv[1], ["train.stop_at=1"]))
assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
"""
    result = run([sys.executable, "-c", program, str(tiny())])
    assert result.returncode == 0, result.stderr


def test_layers_side_by_side_exchange_their_gradients_at_the_end(tiny):
    """Without overlap, DeepSpeed's exchange waits for one stream: it may not begin while layers write gradients."""

    def bucket(**parallel):
        config = load_config(tiny(train={"wavefront": 8}, parallel=parallel))
        return deepspeed_config(config, 3, 4, 10**9)["zero_optimization"]["reduce_bucket_size"]

    assert bucket() == bucket(overlap=False) == bucket(zero_stage=2) == 10**9
    assert bucket(overlap=True) == 10**9 // 16 and bucket(overlap=True, reduce_bucket=300) == 300


def test_how_gradients_are_exchanged_is_passed_on(tiny):
    given = {"overlap": True, "reduce_bucket": 300, "gather_bucket": 400, "reduce_fp32": True}
    settings = deepspeed_config(load_config(tiny(parallel=given)), 3, 4, 1000)
    assert settings["zero_optimization"] == {
        "stage": 1,
        "overlap_comm": True,
        "reduce_bucket_size": 300,
        "allgather_bucket_size": 400,
        "parameter_alignment": True,
    }
    assert settings["communication_data_type"] == "fp32"
    assert deepspeed_config(load_config(tiny()), 3, 4, 1000)["communication_data_type"] is None
    config = load_config(tiny(parallel={"zero_stage": 3, "node_ranks": 2}))
    assert deepspeed_config(config, 3, 4, 1000)["zero_optimization"]["zero_hpz_partition_size"] == 2
    check_node_ranks(config, 4)
    with pytest.raises(UserError, match="parallel.node_ranks: given 2; must divide the number of ranks, 3"):
        check_node_ranks(config, 3)
    with pytest.raises(UserError, match="parallel.node_ranks: given 2; only with parallel.zero_stage=3"):
        load_config(tiny(parallel={"node_ranks": 2}))
    with pytest.raises(UserError, match="parallel.gather_bucket: given 5; ZeRO 3 has no such exchange"):
        load_config(tiny(parallel={"zero_stage": 3, "gather_bucket": 5}))


def test_the_memorys_start_does_not_decay():
    model = build_model(ModelConfig(mixers=["lmm"], vocab_size=8, d_model=8, n_layers=1, n_heads=2))
    names = {id(p): name for name, p in model.named_parameters()}
    decay, keep = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1))
    assert {n for n in keep if ".network.weight_" in n} == {f"blocks.0.mixer.memory.network.weight_{n}" for n in (0, 1)}
    assert {"blocks.0.mixer.out.weight", "blocks.0.mixer.persistent", "embedding.weight"} <= decay


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_parameter_begins_where_a_tensor_of_its_own_would(tiny, ranks, precision):
    """Compiled blocks assume alignment: an odd number of gates must not shift parameters in DeepSpeed's buffer."""
    model = {"mixers": ["lmm"], "d_model": 24, "n_heads": 3, "n_layers": 2}
    config = load_config(tiny(model=model, train={"precision": precision}))
    engine = Engine(task_of(config), build_model(config.model), ranks)
    sizes = [p.numel() * p.element_size() for p in engine.model.parameters()]
    assert any(size % 16 for size in sizes)
    assert all(p.data_ptr() % 16 == 0 for p in engine.model.parameters())


@pytest.mark.thorough
@pytest.mark.usefixtures("one_group")
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_gpus_optimiser_makes_the_same_updates_and_resumes_bit_for_bit(tiny, tmp_path, monkeypatch, zero_stage):
    """The fused AdamW under ZeRO's flat masters; PyTorch has it for CPUs also."""
    config = tiny(parallel={"zero_stage": zero_stage}, model={"mixers": ["lmm"]})

    def trained(run: str, device: str, *ends: int) -> dict[str, torch.Tensor]:
        """Weights and moments after the last of ``ends``, at which the run stops, with the optimiser of ``device``."""
        fused = []

        def optimiser(task, model, _device):
            made = Task.optimizer(task, model, torch.device(device))
            fused.append(made.defaults["fused"])
            return made

        monkeypatch.setattr(TASKS.find("language"), "optimizer", optimiser)
        for end in ends:
            assert loop.train(load_config(config, [f"run.dir={tmp_path / run}", f"train.stop_at={end}"])) == 0
        assert set(fused) == {True if device == "cuda" else None}
        path = checkpoints.checkpoint_path(tmp_path / run / "checkpoints", ends[-1])
        assert checkpoints.read_state(path).adam_step == ends[-1]
        return load_file(path / checkpoints.MODEL) | load_file(path / checkpoints.OPTIMIZER)

    plain, whole, parts = trained("plain", "cpu", 4), trained("whole", "cuda", 4), trained("parts", "cuda", 2, 4)
    for name, expected in whole.items():
        assert torch.equal(parts[name], expected), name
        torch.testing.assert_close(plain[name], expected, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_blocks_share_a_compiled_program_on_a_gpu(tiny, ranks):
    """Three heads have nine gates: without alignment, later parameters would have another offset in every block."""
    model = {"mixers": ["lmm"], "d_model": 96, "n_heads": 3, "n_layers": 3, "memory": {"chunk_size": 16, "depth": 2}}
    ids = torch.randint(0, 50, (3, 131), device=ranks.device, generator=torch.Generator(ranks.device).manual_seed(1))

    def losses(compiled: bool) -> list[float]:
        train = {"precision": "bf16", "compile": compiled, "batch_tokens": 390, "micro_batch": 3}
        config = load_config(tiny(model=model, train=train, data={"seq_len": 130}))
        torch.manual_seed(0)
        engine = Engine(task_of(config), build_model(config.model), ranks)
        engine.set_lr(1e-3)
        return [float(engine.micro_step((ids, None))) for _ in range(4)]

    assert losses(True) == pytest.approx(losses(False), rel=2e-2)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_micro_batches_are_summed_in_fp32_and_steps_that_are_not_finite_are_skipped(tiny, ranks, zero_stage):
    """A sum of 64 in bf16 loses 0.8 % of the gradient; here only the rounding of one bf16 exchange remains."""
    count = 64
    train = {"precision": "bf16", "batch_tokens": 16 * count, "clip": 1e9}
    config = load_config(tiny(train=train, parallel={"zero_stage": zero_stage}, model={"mixers": ["lmm"]}))
    task = task_of(config)
    torch.manual_seed(0)
    engine = Engine(task, task.build_model(), ranks)
    engine.set_lr(1e-3)
    loader = Loader(task.open().train, 1, 0, 1, count)
    batches = [task.to_device(batch, ranks.device) for batch in loader.batches(0)]
    parameters, expected = dict(engine.model.named_parameters()), {}
    for batch in batches:
        loss = engine._engine.module(*batch)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            expected[name] = expected.get(name, 0.0) + (0.0 if gradient is None else gradient.double() / count)

    def moments() -> dict[str, torch.Tensor]:
        return {(kind, name): tensor.double().clone() for kind, name, tensor in engine.masters.gather()}

    for batch in batches:
        engine.micro_step(batch)
    assert engine.update_applied()
    after = moments()
    beta = 1 - config.train.betas[0]
    error = sum((after["exp_avg", name] / beta - expected[name]).square().sum() for name in parameters).sqrt()
    norm = sum(torch.as_tensor(each).square().sum() for each in expected.values()).sqrt()
    assert error / norm < 0.003
    assert engine.gradient_norm() == pytest.approx(float(norm), rel=1e-3)

    for n, batch in enumerate(batches):
        engine.micro_step(batch, refuse=lambda _loss, n=n: n == 5)
    assert not engine.update_applied()
    for key, tensor in moments().items():
        torch.testing.assert_close(tensor, after[key], rtol=0, atol=0)
    assert engine.masters.updates == 1


def test_deepspeeds_linear_under_zero_3_stays_inside_the_engines_steps(tiny, ranks):
    """Its linear layers keep no gathered weights; DeepSpeed would leave them to the rest of the process."""
    plain, seen = F.linear, []
    task = task_of(load_config(tiny(parallel={"zero_stage": 3}, model={"mixers": ["lmm"]})))
    engine = Engine(task, task.build_model(), ranks)
    batch = next(iter(Loader(task.open().train, 1, 0, 1, 1).batches(0)))
    engine.micro_step(task.to_device(batch, ranks.device), lambda _part: seen.append(F.linear is plain))
    assert seen == [False] * 3 and F.linear is plain
