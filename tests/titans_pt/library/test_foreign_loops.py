"""Other projects' training loops around our layers: compiled, checkpointed, sharded, with Hugging Face's Trainer."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from titans_pt import LMM, MAC, MAG, MAL, NeuralMemory, UserError, mixer

SMALL = {"n_heads": 2, "chunk_size": 4, "depth": 2, "conv_width": 3}
LAYERS = {
    "memory": lambda: NeuralMemory(16, **SMALL),
    "lmm": lambda: LMM(16, **SMALL),
    "mac": lambda: MAC(16, **SMALL, segment=8, memory_tokens=4, persistent_tokens=2),
    "mag": lambda: MAG(16, **SMALL, window=8, persistent_tokens=2),
    "mal": lambda: MAL(16, **SMALL, window=8, persistent_tokens=2),
}


class Model(nn.Module):
    """A plain foreign model with one of our layers; batches and outputs have the form that the Trainer expects."""

    def __init__(self, layer: nn.Module, checkpointed: bool = False):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(8, 16), layer, nn.Linear(16, 8)
        self.checkpointed = checkpointed

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        y = checkpoint(self.layer, x, use_reentrant=False)[0] if self.checkpointed else self.layer(x)[0]
        logits = self.head(x + y)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.roll(-1, 1).flatten())}


def model(name: str, **more) -> Model:
    torch.manual_seed(0)
    return Model(LAYERS[name](), **more)


def batch(rows: int = 4) -> torch.Tensor:
    return torch.randint(8, (rows, 12), generator=torch.Generator().manual_seed(1))


def gradients(net: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    net(ids)["loss"].backward()
    return {name: p.grad for name, p in net.named_parameters()}


def equal(ours: dict, theirs: dict, **how):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], **how, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", LAYERS)
def test_activation_checkpointing_gives_the_same_gradients(name):
    expected = gradients(model(name), batch())
    equal(gradients(model(name, checkpointed=True), batch()), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", [{"rule": "dot"}, {"rule": "yaad", "form": "switch"}, {}], ids=str)
def test_activation_checkpointing_where_c_does_not_serve(rule, monkeypatch):
    monkeypatch.setenv("TITANS_NATIVE", "0")
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        found.append(gradients(Model(NeuralMemory(16, **SMALL, **rule), checkpointed), batch()))
    equal(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["memory", "mac"])
def test_autocast_keeps_the_memory_in_fp32(name):
    net = model(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = net.layer(torch.randn(2, 12, 16))
        loss = net(batch())["loss"]
    loss.backward()
    memory = state if name == "memory" else state.memory
    assert all(w.dtype == torch.float32 for w in memory.memory.weights)
    plain = gradients(copy.deepcopy(net), batch())
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    assert norm == pytest.approx(torch.cat([g.flatten() for g in plain.values()]).norm().item(), rel=0.1)


@pytest.mark.slow(reason="torch.compile traces for half a minute, and Inductor's code takes a compiler as long")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name, backend", [("memory", "aot_eager"), ("memory", "inductor"), ("mac", "aot_eager")])
def test_torch_compile_gives_the_same_gradients(name, backend):
    """Only calls of our kernels break the graph; outputs and gradients are the same."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    expected = gradients(model(name), batch())
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model(name), backend=backend)
    found = gradients(compiled, batch())
    equal({key.removeprefix("_orig_mod."): g for key, g in found.items()}, expected, rtol=1e-4, atol=1e-6)
    if name == "memory":
        assert counters["graph_break"] and all("torch.compiler.disable" in reason for reason in counters["graph_break"])


class Outputs(nn.Module):
    """A layer's outputs alone: torch.export knows no states."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("name", ["swa", "gated_deltanet", "mamba", "memory", "mac", "ttt_mlp"])
def test_torch_export_is_right_or_refused(name):
    net = Outputs(LAYERS[name]() if name in LAYERS else mixer(name, 16)).eval()
    x, other = torch.randn(2, 2, 9, 16)
    with torch.no_grad():
        if name in ("memory", "mac", "ttt_mlp"):
            with pytest.raises(UserError, match="^torch.export: given a .*memory, .* compile the model with"):
                torch.export.export(net, (x,))
            return
        torch.testing.assert_close(torch.export.export(net, (x,)).module()(other), net(other))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["swa", "mamba", "longhorn", "gated_deltanet", "gla", "memory", "mac", "hope", "ttt_mlp"]
)
def test_torch_jit_trace_is_right_or_refused(name):
    """For the length of the example alone: traces hold no other."""
    net = Outputs(LAYERS[name]() if name in LAYERS else mixer(name, 16)).eval()
    x, other = torch.randn(2, 2, 9, 16)
    with torch.no_grad():
        if name in ("memory", "mac", "hope"):
            with pytest.raises(UserError, match="^torch.jit.trace: given a memory, .* compile the model with"):
                torch.jit.trace(net, (x,))
            return
        torch.testing.assert_close(torch.jit.trace(net, (x,), check_trace=False)(other), net(other))


def in_processes(work, tmp_path, *args):
    """Run ``work`` in two new processes. Forks would share the process group that the tests' process may have."""
    mp.start_processes(_worker, (work, str(tmp_path / "meet"), args), nprocs=2, start_method="spawn")


def _worker(rank: int, work, meet: str, args: tuple):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()


def _replicated(rank: int, name: str):
    net, half = DistributedDataParallel(model(name)), batch().chunk(2)[rank]
    found = gradients(net, half)
    equal({key.removeprefix("module."): g for key, g in found.items()}, gradients(model(name), batch()), **CLOSE)


def _sharded(rank: int, name: str):
    """Train three steps of AdamW under FSDP2, with the layer as a separate unit."""
    net, half = model(name), batch().chunk(2)[rank]
    fully_shard(net.layer)
    fully_shard(net)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found = {key: g.full_tensor() for key, g in gradients(net, half).items()}
    equal(found, gradients(model(name), batch()), **CLOSE)
    before = net(half)["loss"].item()
    for _ in range(3):
        optimiser.step()
        gradients(net, half)
    assert net(half)["loss"].item() < before


CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def _both(rank: int, name: str):
    """Run both checks in one start of processes."""
    _replicated(rank, name)
    _sharded(rank, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["memory", pytest.param("mac", marks=pytest.mark.slow(reason="seconds each"))])
def test_two_processes_give_the_gradients_of_one(name, tmp_path):
    """The mean gradient over a batch's halves equals the whole batch's, under DDP and under FSDP2."""
    in_processes(_both, tmp_path, name)


@pytest.mark.slow(reason="imports transformers' Trainer, which takes seconds")
def test_hugging_faces_trainer_trains_a_plain_model(tmp_path):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, learning_rate=2e-2, logging_steps=1, report_to=[],
        save_steps=8, use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    net = model("mac")
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(9)[None] * torch.arange(1, 9)[:, None]) % 8]
    trainer = Trainer(net, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    saved = load_file(tmp_path / "checkpoint-8/model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in net.named_parameters())


def test_accelerate_prepares_it():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model("lmm")
    net, optimiser = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=2e-2))
    losses = []
    for _ in range(8):
        with accelerator.accumulate(net):
            loss = net(batch())["loss"]
            accelerator.backward(loss)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1]) and losses[-1] < 0.95 * losses[0]
