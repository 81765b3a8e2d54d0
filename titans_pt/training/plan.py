"""What a training will need, before it starts: the grid of ranks, the batch, and an estimate of a rank's memory."""

import contextlib
import math
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from titans_pt.config import MEMORY_MIXERS, Config
from titans_pt.errors import UserError
from titans_pt.kernels.memory.dispatch import HAS_TRITON
from titans_pt.layers.memory import NeuralMemory
from titans_pt.models.language_model import LanguageModel
from titans_pt.parallel import TensorGroup, TensorParallel
from titans_pt.parallel.topology import check_world_size
from titans_pt.training.engine import local_batch, reduce_bucket
from titans_pt.training.loss import rows_at_once

GIB = 2**30
PROBE_TOKENS = 1024
"""What is measured with real numbers is measured on one row of at most so many tokens, on the CPU."""
HEADROOM = 0.9
"""Share of a device's memory that may be planned with; the rest is for the allocator's gaps and the libraries."""


@dataclass(frozen=True)
class TrainingPlan:
    """bytes: what a rank holds at its fullest, by kind."""

    config: Config
    parameters: int
    tensor: int
    data: int
    micro_batch: int
    accumulation: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def text(self) -> str:
        train, parallel = self.config.train, self.config.parallel
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in self.bytes.items())
        return (
            f"plan: {self.parameters:,} parameters on {self.tensor * self.data} ranks = {self.tensor} tensor x "
            f"{self.data} data{', sequence split' if parallel.sequence else ''}, ZeRO {parallel.zero_stage}, "
            f"{train.precision}\n"
            f"plan: {train.batch_tokens:,} tokens a step = {self.data} data ranks x {self.accumulation} micro-batches "
            f"x {self.micro_batch} samples x {self.config.data.seq_len} tokens\n"
            f"plan: estimated memory of a rank {self.total / GIB:.2f} GiB: {kinds}"
        )

    def check(self, gib: float | None = None):
        """Refuses what cannot fit.

        Args:
            gib: memory of a rank's device in GiB; None takes that of this machine's GPUs, and without one nothing
                is refused.

        Raises:
            UserError: the estimate is above HEADROOM of it.
        """
        if gib is None and torch.cuda.is_available():
            gib = torch.cuda.get_device_properties(0).total_memory / GIB
        if gib is None or self.total <= HEADROOM * gib * GIB:
            return
        kind, size = max(self.bytes.items(), key=lambda item: item[1])
        train, parallel = self.config.train, self.config.parallel
        if kind in ("activations", "memory states", "memory scratch", "logits"):
            remedies = [f"train.micro_batch={max(1, self.micro_batch // 2)}"] if self.micro_batch > 1 else []
            if not train.activation_checkpointing and kind != "logits":
                remedies.append("train.activation_checkpointing=true")
        else:
            remedies = [f"parallel.zero_stage={parallel.zero_stage + 1}"] if parallel.zero_stage < 3 else []
        remedies.append(f"parallel.tensor={2 * self.tensor}")
        raise UserError(
            f"the plan needs about {self.total / GIB:.1f} GiB a rank, of which {kind} {size / GIB:.1f}, and may use "
            f"{HEADROOM:.0%} of {gib:.1f} GiB; set {' or '.join(remedies)}, or use more ranks"
        )


def make_plan(config: Config, ranks: int | None = None, gpu: bool | None = None) -> TrainingPlan:
    """The plan of ``config`` on ``ranks`` processes; None takes WORLD_SIZE, else this machine's GPUs.

    gpu: whether it is for GPUs, whose kernels keep other things than what runs on a CPU; None: whether there are any.

    Raises:
        UserError: the ranks or the batch do not divide.
    """
    tensor = config.parallel.tensor
    world = int(os.environ.get("WORLD_SIZE", 0)) or torch.cuda.device_count() or tensor if ranks is None else ranks
    if world < 1:
        raise UserError(f"--ranks: given {world}; at least 1")
    check_world_size(tensor, world)
    micro, accumulation = local_batch(config, world // tensor)
    with torch.device("meta"):
        model = LanguageModel(config.model)
    parameters = sum(p.numel() for p in model.parameters())
    TensorParallel(model, _Rehearsal(0, tensor), config.parallel.sequence)
    own = sum(p.numel() for p in model.parameters())
    gpu = torch.cuda.is_available() if gpu is None else gpu
    sizes = _model_bytes(config, own, world // tensor) | _activation_bytes(config, micro, gpu)
    return TrainingPlan(config, parameters, tensor, world // tensor, micro, accumulation, sizes)


class _Rehearsal(TensorGroup):
    """A tensor group of one rank that gives every exchange's result its size, not its content."""

    def all_reduce(self, x: Tensor, op=None) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.part(x, dim).clone()


def _model_bytes(config: Config, own: int, data: int) -> dict[str, int]:
    """Of ``own`` parameters after the tensor split, under ZeRO over ``data`` ranks."""
    width = _width(config)
    stage = config.parallel.zero_stage
    shard = -(-own // data)
    return {
        "parameters": width * (shard if stage == 3 else own),
        "gradients": width * own if stage == 1 else 4 * shard,
        "optimiser": 12 * shard,  # fp32 weights and Adam's two moments
        "communication": width * reduce_bucket(own),
    }


def _activation_bytes(config: Config, micro: int, gpu: bool) -> dict[str, int]:
    """What a micro-batch keeps for the backward pass, by what the real blocks keep."""
    m, pattern = config.model, config.model.pattern
    length, kinds = config.data.seq_len, sorted(set(pattern))
    found: dict[str, int] = {}
    if gpu and config.train.precision == "bf16" and _kernels_serve(config):
        kept, states = _kept(config, micro, length, "meta"), dict.fromkeys(kinds, 0)
        if set(kinds) & set(MEMORY_MIXERS):
            from titans_pt.kernels.memory.fused.operators import SCRATCH_BYTES

            found["memory scratch"] = SCRATCH_BYTES
    else:  # a part of one row, scaled: all but the states grows with the tokens
        probe = min(length, max(PROBE_TOKENS, m.segment if "mac" in pattern else 1))
        probe -= probe % config.parallel.tensor
        states = {kind: micro * _state_bytes(config, kind, length) for kind in kinds}
        short = {kind: size - _state_bytes(config, kind, probe) for kind, size in _kept(config, 1, probe).items()}
        kept = {kind: micro * size * length // probe for kind, size in short.items()}
    if config.train.activation_checkpointing:  # the blocks' inputs, and one block at a time
        inputs = _width(config) * micro * length * m.d_model
        inputs //= config.parallel.tensor if config.parallel.sequence else 1
        activations, memory = inputs * m.n_layers + max(kept.values()), max(states.values())
    else:
        activations, memory = sum(kept[kind] for kind in pattern), sum(states[kind] for kind in pattern)
    # The head's output, the same in fp32, its softmax, and their two gradients; of the samples that are taken at once.
    logits = length * m.vocab_size // config.parallel.tensor * (2 * _width(config) + 12)
    found |= {"memory states": memory} if memory else {}
    return {"activations": activations, **found, "logits": rows_at_once(micro, length, m.vocab_size) * logits}


def _kernels_serve(config: Config) -> bool:
    """Whether a GPU takes the fused kernels wherever there is a memory: they alone run without contents."""
    m = config.model
    if not set(m.pattern) & set(MEMORY_MIXERS):
        return True
    if not HAS_TRITON:
        return False
    from titans_pt.kernels.memory.fused import unsupported

    with torch.device("meta"):
        memory = NeuralMemory(m.d_model, m.memory_heads, m.conv_width, m.memory, m.norm_eps)
        q = torch.empty(1, 1, m.memory_heads, m.d_model // m.memory_heads, dtype=torch.bfloat16)
    return unsupported(q, memory.network()[0], m.memory.chunk_size) is None


def _kept(config: Config, rows: int, length: int, device: str = "cpu") -> dict[str, int]:
    """Bytes that autograd keeps in one block of each kind, by kind; "meta": on a GPU's paths, without computing."""
    m, tensor = config.model, config.parallel.tensor
    kinds = sorted(set(m.pattern))
    # In the training's own precision, with a vocabulary that does not count.
    small = m.model_copy(update={"mixers": kinds, "n_layers": len(kinds), "vocab_size": tensor})
    with torch.device(device):
        model = LanguageModel(small).to(torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
        ids = torch.zeros(rows, length, dtype=torch.int64)
    TensorParallel(model, _Rehearsal(0, tensor), config.parallel.sequence)

    kept: dict[str, int] = {}
    for kind, block in zip(kinds, model.blocks, strict=True):
        kept[kind] = 0

        def before(_block, _arguments, kind=kind):
            kept[kind] -= saved.total

        def after(_block, _arguments, _output, kind=kind):
            kept[kind] += saved.total

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    with contextlib.nullcontext() if device == "cpu" else _FusedNorms(), _Saved(model) as saved:
        model(ids, output_final_state=False)
    return kept


class _FusedNorms(TorchFunctionMode):
    """RMSNorm is several operators where there is no GPU, each of which keeps its input; there it is one. Numbers are
    not computed."""

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
    """Bytes that autograd keeps in the ``with``, each storage once, those of the model's parameters not at all."""

    def __init__(self, model: torch.nn.Module):
        self._seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept, self.total = [], 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)
        self._kept.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:  # those of no contents have no address
            self._seen.add(storage._cdata)
            self._kept.append(storage)  # else its address is given to another
            self.total += storage.nbytes()
        return tensor


def _state_bytes(config: Config, kind: str, length: int) -> int:
    """fp32 memory states that one row of ``length`` tokens keeps in one block: weights, momentum, chunk weights."""
    m = config.model
    if kind not in MEMORY_MIXERS:
        return 0
    width = m.d_model // m.memory_heads
    widths = [width, *[m.memory.expansion * width] * (m.memory.depth - 1), width]
    one = sum(a * b for a, b in zip(widths[:-1], widths[1:], strict=True)) * m.memory_heads // config.parallel.tensor
    piece = min(length, m.segment) if kind == "mac" else length  # MAC calls its memory segment by segment
    blocks = -(-piece // min(m.memory.chunk_size, 64))
    kept = -(-blocks // (m.memory.save_every or math.isqrt(blocks)))
    return 12 * one * kept * -(-length // piece)


def _width(config: Config) -> int:
    """Bytes of a number in training precision."""
    return 2 if config.train.precision == "bf16" else 4
