"""Requirements of a training run before it starts: the grid of ranks, the batch, and estimated memory per rank."""

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titans_pt.config import Config
from titans_pt.config.files import validated
from titans_pt.errors import UserError
from titans_pt.models import Backbone
from titans_pt.models.backbone import Block
from titans_pt.models.mixers import Mixer
from titans_pt.models.mixers.common import any_memory
from titans_pt.parallel import RankGroup, TensorParallel
from titans_pt.parallel.topology import data_ranks, grid_text
from titans_pt.tasks import Task, task_of
from titans_pt.tools.processes import place
from titans_pt.training.engine import check_node_ranks, local_batch, reduce_bucket, sums_in_fp32
from titans_pt.training.freezing import freeze, trained
from titans_pt.training.metrics import PEAK_FLOPS
from titans_pt.training.optimizers import optimizer_of

GIB = 2**30
PROBE_TOKENS = 1024
"""Tokens of the one row that measurements with real numbers use on the CPU, at most."""
FP32 = 4
"""Bytes of a number in a checkpoint and in the optimiser."""
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200; each runs one program of the memory's serial kernels at a time."""
BUSY = 0.7
"""Share of busy multiprocessors below which a plan warns."""
HEADROOM = 0.9
"""Share of a device's memory that a plan may use; the rest is for allocator fragmentation and libraries."""


@dataclass(frozen=True)
class TrainingPlan:
    """Grid, batch, memory and cost of a training run.

    data: number of data ranks.
    bytes: peak memory of a rank, by kind.
    """

    config: Config
    parameters: int
    trained: int
    data: int
    micro_batch: int
    accumulation: int
    bytes: dict[str, int]
    cost: "Cost"
    sequences: tuple[int, int]
    """(rows, tokens per row) that the blocks read for one sample."""
    gpu: bool
    """Whether ``bytes`` is for GPU kernels; else for CPU operators."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def ranks(self) -> int:
        return self.data * self.config.parallel.context * self.config.parallel.tensor

    def text(self) -> str:
        train, parallel = self.config.train, self.config.parallel
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in self.bytes.items())
        device, split = "GPU" if self.gpu else "CPU", ", sequence split" if parallel.sequence else ""
        return (
            f"plan: {self.parameters:,} parameters{self._frozen()} on {self.ranks} ranks = "
            f"{grid_text(self.data, parallel.context, parallel.tensor)}{split}, "
            f"ZeRO {parallel.zero_stage}, {train.precision}\n"
            f"plan: {train.batch_tokens:,} tokens per step = {self.data} data ranks x {self.accumulation} "
            f"micro-batches x {self.micro_batch} samples x {self.config.data.seq_len} tokens\n"
            f"{self._read()}"
            f"plan: estimated memory per rank, on a {device}, {self.total / GIB:.2f} GiB: {kinds}\n"
            f"{self._idle()}{self._spanning()}plan: {self.cost.text()}"
        )

    def _frozen(self) -> str:
        return "" if self.trained == self.parameters else f" ({self.trained:,} of them trained)"

    def _read(self) -> str:
        """A line about the tokens that the blocks read, if they differ from the samples' tokens."""
        rows, length = self.sequences
        if (rows, length) == (1, self.config.data.seq_len):
            return ""
        samples = self.config.train.batch_tokens // self.config.data.seq_len
        return (
            f"plan: the blocks read each sample as {rows} rows of {length} tokens: {samples * rows * length:,} tokens "
            f"per step, {self.cost.read:,} in all\n"
        )

    def _idle(self) -> str:
        """A warning if the memory's serial kernels (one program per row and head) leave much of a GPU idle."""
        model = self.config.model
        if self.config.train.precision != "bf16" or not any_memory(model.kinds):
            return ""
        programs = self.micro_batch * self.sequences[0] * model.memory_heads // self.config.parallel.tensor
        busy = programs / (-(-programs // MULTIPROCESSORS) * MULTIPROCESSORS)
        if busy >= BUSY:
            return ""
        return (
            f"plan: the memory's serial kernels have {programs} programs a call (samples x heads), which keep "
            f"{busy:.0%} of an H100's {MULTIPROCESSORS} multiprocessors busy; a larger train.micro_batch, or fewer "
            "ranks for the same batch, is faster\n"
        )

    def _spanning(self) -> str:
        """A warning if ranks of a tensor group, which are neighbours, are on different nodes."""
        tensor, node = self.config.parallel.tensor, place(strict=False).local_size
        if node is None or node >= self.ranks or node % tensor == 0:
            return ""
        return (
            f"plan: warning: groups of parallel.tensor={tensor} ranks span nodes of {node} processes, whose network is "
            f"slower than a node's; parallel.tensor={math.gcd(tensor, node)} stays inside\n"
        )

    def check(self, gib: float | None = None):
        """Refuses a plan that cannot fit into memory.

        Args:
            gib: memory per device in GiB; None: memory of this machine's GPU; without a GPU nothing is refused.

        Raises:
            UserError: the estimate is above HEADROOM of this memory.
        """
        if gib is None and torch.cuda.is_available():
            gib = torch.cuda.get_device_properties(0).total_memory / GIB
        if gib is None or self.total <= HEADROOM * gib * GIB:
            return
        kind, size = max(self.bytes.items(), key=lambda item: item[1])
        raise UserError(
            f"the plan needs about {self.total / GIB:.1f} GiB per rank, of which {kind} {size / GIB:.1f}, and may use "
            f"{HEADROOM:.0%} of {gib:.1f} GiB; {self._remedy(HEADROOM * gib * GIB)}"
        )

    def _remedy(self, limit: float) -> str:
        """Settings that make the plan fit into ``limit`` bytes, or at least lower its memory."""
        words = [
            "train.activation_checkpointing=true",
            f"train.micro_batch={max(1, self.micro_batch // 2)}", "train.micro_batch=1",
            *(f"parallel.zero_stage={stage}" for stage in range(self.config.parallel.zero_stage + 1, 4)),
            f"parallel.tensor={2 * self.config.parallel.tensor}",
        ]  # fmt: skip
        lower: dict[str, int] = {}
        for word in dict.fromkeys(words):
            with contextlib.suppress(UserError):  # the setting conflicts with others
                changed = task_of(validated(self.config.model_dump(mode="json"), [word]))
                other = make_plan(changed, self.ranks, self.gpu).total
                lower |= {word: other} if other < self.total else {}
        if fitting := [word for word, total in lower.items() if total <= limit]:
            return f"set {' or '.join(fitting)}, or use more ranks"
        return f"use more ranks{', with ' * bool(lower)}{' or '.join(lower)}, or a smaller model"


def make_plan(task: Task, ranks: int | None = None, gpu: bool | None = None) -> TrainingPlan:
    """Plans the training of ``task`` on ``ranks`` processes.

    Args:
        ranks: None: WORLD_SIZE, or this machine's number of GPUs, or without GPUs those of one model.
        gpu: whether to plan for GPUs, whose kernels keep other tensors than CPU operators; None: whether this machine
            has GPUs.

    Raises:
        UserError: the ranks or the batch do not divide.
    """
    config = task.config
    tensor, context = config.parallel.tensor, config.parallel.context
    if (world := ranks) is None:
        world = place().size if os.environ.get("WORLD_SIZE") else torch.cuda.device_count() or tensor * context
    if world < 1:
        raise UserError(f"--ranks: given {world}; at least 1")
    check_node_ranks(config, world)
    data = data_ranks(tensor, context, world)
    micro, accumulation = local_batch(config, data)
    with torch.device("meta"):
        model = task.build_model()
    parameters = sum(p.numel() for p in model.parameters())
    freeze(model, config.train.trainable)
    learned = trained(model)
    TensorParallel(model, _Rehearsal(0, tensor), config.parallel.sequence)
    own = sum(p.numel() for p in model.parameters()), trained(model), _moments(task, model)
    gpu = torch.cuda.is_available() if gpu is None else gpu
    sizes = _model_bytes(config, *own, context * data, accumulation) | _activation_bytes(task, micro, gpu)
    sequences = task.sequences(1, config.data.seq_len)
    return TrainingPlan(config, parameters, learned, data, micro, accumulation, sizes, cost_of(task), sequences, gpu)


@dataclass(frozen=True)
class Cost:
    """Cost of a whole training run.

    tokens: tokens (time steps) of all samples.
    flops: FLOPs as counted by titans_pt.layers.flops.
    disk: bytes of all kept checkpoints.
    checkpoint: bytes of one.
    read: tokens that the blocks read.
    """

    parameters: int
    tokens: int
    flops: float
    disk: int
    checkpoint: int
    read: int

    def text(self) -> str:
        hours = ", ".join(f"{self.gpu_hours(mfu):,.3g} at {mfu:.0%} MFU" for mfu in (0.4, 0.1))
        return (
            f"{self.tokens:,} tokens in all, {self.flops:.3g} FLOPs: H100-hours {hours} (assumed, not measured); "
            f"checkpoints {self.disk / GIB:.2f} GiB, and {self.checkpoint / GIB:.2f} more while the newest is written"
        )

    def gpu_hours(self, mfu: float) -> float:
        """GPU-hours on an H100 that reaches the fraction ``mfu`` of its dense bf16 peak."""
        return self.flops / (mfu * PEAK_FLOPS["H100"] * 3600)


def cost_of(task: Task) -> Cost:
    """The cost of training ``task`` to train.max_steps."""
    config, train = task.config, task.config.train
    with torch.device("meta"):
        model: Any = task.build_model()  # a module with flops
    freeze(model, train.trainable)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = train.max_steps * train.batch_tokens
    kept = train.keep_last + (train.max_steps // _steps_kept(config) if train.keep_every else 0)
    kept += bool(train.patience)  # the best checkpoint stays
    saved = -(-train.max_steps // train.checkpoint_every)
    saved += train.max_steps // train.eval_every if train.patience else 0  # each validation may be the best so far
    saved += train.max_steps // config.evaluation.every if config.evaluation.every else 0
    flops = tokens * model.flops(config.data.seq_len).total
    rows, length = task.sequences(tokens // config.data.seq_len, config.data.seq_len)
    checkpoint = FP32 * (parameters + _moments(task, model))
    return Cost(parameters, tokens, flops, min(kept, saved) * checkpoint, checkpoint, rows * length)


def _steps_kept(config: Config) -> int:
    """Steps between checkpoints that train.keep_every keeps for good: it keeps those that are written anyway."""
    written = [every for every in (config.train.checkpoint_every, config.evaluation.every) if every]
    return min(math.lcm(config.train.keep_every or 1, every) for every in written)


def unkept(config: Config) -> list[str]:
    """A warning if checkpoints that train.keep_every would keep are never written; else nothing."""
    train = config.train
    if train.keep_every is None or (steps := _steps_kept(config)) == train.keep_every:
        return []
    last, written = train.max_steps, train.checkpoint_every
    kept = f"only one every {steps} steps" if steps <= last else f"none up to train.max_steps={last}"
    return [f"train.keep_every={train.keep_every}: checkpoints are written every {written} steps, and it keeps {kept}; "
            f"set train.keep_every={-(-train.keep_every // written) * written}, or "
            f"train.checkpoint_every={math.gcd(train.keep_every, written)}"]  # fmt: skip


class _Rehearsal(RankGroup):
    """A tensor group of one rank whose exchanges return results of the right size but wrong content."""

    def all_reduce(self, x: Tensor, op=None) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.part(x, dim).clone()


def _moments(task: Task, model: nn.Module) -> int:
    """Numbers of the optimiser's state, from an update of flat tensors, as ZeRO has them, on the meta device."""
    optimizer = optimizer_of(task, model, torch.device("meta"))
    for group in optimizer.param_groups:
        flat = nn.Parameter(torch.empty(sum(p.numel() for p in group["params"]), device="meta"))
        flat.grad = torch.empty_like(flat)
        group["params"] = [flat]
        group |= {"fused": None} if "fused" in group else {}  # torch fuses nothing on this device
    optimizer.step()
    state = [(key, value) for held in optimizer.state.values() for key, value in held.items()]
    return sum(value.numel() for key, value in state if isinstance(value, Tensor) and key != "step")


def _model_bytes(
    config: Config, own: int, learned: int, moments: int, replicas: int, accumulation: int
) -> dict[str, int]:
    """Bytes by kind that the model takes on one rank.

    Args:
        own: the rank's parameters after the tensor split.
        learned: number of these that are trained.
        moments: numbers of their optimiser's state.
        replicas: number of ranks over which ZeRO shards.
    """
    width = _width(config)
    parallel, bucket = config.parallel, reduce_bucket(config, learned)
    stage = parallel.zero_stage
    shard = -(-learned // replicas)
    second = -(-own // parallel.node_ranks) if parallel.node_ranks else 0  # a second copy of the weights in each node
    kept = 4 if stage == 1 and sums_in_fp32(config, accumulation) else width
    return {
        "parameters": width * (-(-own // replicas) + second if stage == 3 else own),
        "gradients": kept * learned if stage == 1 else 4 * shard,
        "optimiser": FP32 * (shard + -(-moments // replicas)),  # its own weights, and its state
        "communication": (4 if parallel.reduce_fp32 else kept) * (1 + bool(parallel.overlap)) * bucket,
    }


def _activation_bytes(task: Task, samples: int, gpu: bool) -> dict[str, int]:
    """Bytes that a micro-batch of ``samples`` keeps for the backward pass, measured on real blocks."""
    config = task.config
    m, tensor = config.model, config.parallel.tensor
    steps = config.data.seq_len // config.parallel.context
    rows, length = task.sequences(samples, steps)
    mixers = _mixers(config)
    found: dict[str, int] = {}
    bf16 = config.train.precision == "bf16"
    if gpu and bf16 and not any(mixer.unserved(torch.bfloat16) for mixer in mixers.values()):
        kept, states = _kept(config, rows, length, "meta"), dict.fromkeys(mixers, 0)
        if scratch := max(mixer.scratch_bytes() for mixer in mixers.values()):
            found["memory scratch"] = scratch
    else:  # measure a part of one row and scale it: everything but the states grows with the number of tokens
        pieces = (*m.mlp_periods, *(mixer.piece for mixer in mixers.values()))
        probe = min(length, max(PROBE_TOKENS, *pieces))
        probe -= probe % tensor
        states = {kind: rows * mixer.kept_state_bytes(length) for kind, mixer in mixers.items()}
        others = {kind: size - mixers[kind].kept_state_bytes(probe) for kind, size in _kept(config, 1, probe).items()}
        kept = {kind: rows * size * length // probe for kind, size in others.items()}
    if config.train.activation_checkpointing:  # the blocks' inputs, and one block at a time
        inputs = _width(config) * rows * length * m.d_model
        inputs //= tensor if config.parallel.sequence else 1
        activations, memory = inputs * m.n_layers + max(kept.values()), max(states.values())
    else:
        activations, memory = sum(kept[kind] for kind in m.pattern), sum(states[kind] for kind in m.pattern)
    found |= {"memory states": memory} if memory else {}
    return {"activations": activations, **found, **task.output_bytes(samples, steps, _width(config))}


def _one_of_each(config: Config, device: str) -> Backbone:
    """A rank's part of one block for each kind of mixer, in training precision."""
    kinds = config.model.kinds
    small = config.model.model_copy(update={"mixers": kinds, "n_layers": len(kinds)})
    with torch.device(device):
        backbone = Backbone(small).to(torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
    TensorParallel(backbone, _Rehearsal(0, config.parallel.tensor), config.parallel.sequence)
    return backbone


def _blocks(backbone: Backbone) -> list[Block]:
    return [block for block in backbone if isinstance(block, Block)]


def _mixers(config: Config) -> dict[str, Mixer]:
    return {block.mixer.name: block.mixer for block in _blocks(_one_of_each(config, "meta"))}


def _kept(config: Config, rows: int, length: int, device: str = "cpu") -> dict[str, int]:
    """Bytes that autograd keeps in one block of each kind, by kind; "meta" follows the GPU path without computing."""
    backbone = _one_of_each(config, device)
    blocks, kept = _blocks(backbone), dict[str, int]()
    for block in blocks:
        kept[block.mixer.name] = 0

        def before(_block, _arguments, kind=block.mixer.name):
            kept[kind] -= saved.total

        def after(_block, _arguments, _output, kind=block.mixer.name):
            kept[kind] += saved.total

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    here = length // config.parallel.tensor if config.parallel.sequence else length
    weight = blocks[0].mlp_norm.weight
    x = torch.zeros(rows, here, config.model.d_model, dtype=weight.dtype, device=weight.device, requires_grad=True)
    with contextlib.nullcontext() if device == "cpu" else _FusedNorms(), _Saved(backbone) as saved:
        backbone(x, output_final_state=False)
    return kept


class _FusedNorms(TorchFunctionMode):
    """Replaces RMSNorm by one fused operator, as on a GPU; nothing is computed.

    Without a GPU, RMSNorm is several operators, each of which keeps its input.
    """

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is F.rms_norm:
            function = _fused_norm
        return function(*arguments, **(options or {}))


def _fused_norm(input: Tensor, normalized_shape, weight: Tensor, eps: float) -> Tensor:
    return _FusedNorm.apply(input, weight)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _Saved:
    """Counts the bytes that autograd keeps in the ``with``: each storage once, the model's parameters not at all."""

    def __init__(self, model: torch.nn.Module):
        self._seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: list[torch.UntypedStorage] = []
        self.total = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)
        self._kept.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:  # meta tensors have no address
            self._seen.add(storage._cdata)
            self._kept.append(storage)  # else another storage could get the same address
            self.total += storage.nbytes()
        return tensor


def _width(config: Config) -> int:
    """Bytes per number in training precision."""
    return 2 if config.train.precision == "bf16" else 4
