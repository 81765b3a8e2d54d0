"""DeepSpeed, seen through the few calls that training needs.

Only this file and masters.py know DeepSpeed. Two functions here use its private names:

- _one_optimizer_for_all_stages sums gradients in fp32;
- _linear_of_zero keeps DeepSpeed's F.linear out of the rest of the process.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.models.backbone import check_packages
from titans_pt.parallel import Context, TensorParallel, Topology
from titans_pt.tasks import Task
from titans_pt.tasks.base import backbone_of
from titans_pt.training.freezing import freeze, trained
from titans_pt.training.masters import Masters
from titans_pt.training.optimizers import optimizer_of
from titans_pt.training.ranks import Ranks


def local_batch(config: Config, data_size: int) -> tuple[int, int]:
    """(samples of one micro-batch, micro-batches of one step) of each of ``data_size`` data-parallel ranks.

    Raises:
        UserError: train.batch_tokens does not split evenly.
    """
    seq_len, tokens = config.data.seq_len, config.train.batch_tokens
    samples = tokens // seq_len
    if samples % data_size:
        message = (
            f"train.batch_tokens: given {tokens} = {samples} samples of data.seq_len={seq_len}; must be a multiple of "
            f"{data_size} data ranks x {seq_len}, e.g. {-(-samples // data_size) * data_size * seq_len}"
        )
        if samples < data_size:
            few = math.gcd(samples, data_size)
            message += (
                f"; {few} data ranks can share this batch: start fewer processes, or raise parallel.tensor or "
                f"parallel.context {data_size // few}-fold"
            )
        raise UserError(message)
    samples //= data_size
    micro = min(config.train.micro_batch, samples)
    if samples % micro:
        fits = max(d for d in range(1, micro + 1) if samples % d == 0)
        raise UserError(
            f"train.micro_batch: given {config.train.micro_batch}; must divide the {samples} samples that each of "
            f"{data_size} ranks takes of train.batch_tokens={tokens}, e.g. {fits}"
        )
    return micro, samples // micro


def check_node_ranks(config: Config, ranks: int):
    """
    Raises:
        UserError: parallel.node_ranks does not divide the number of ranks.
    """
    size = config.parallel.node_ranks or 1
    if ranks % size:
        raise UserError(f"parallel.node_ranks: given {size}; must divide the number of ranks, {ranks}; set it to "
                        f"{math.gcd(size, ranks)}, or leave it out")  # fmt: skip


OVERLAPPED = 25_000_000
"""Least elements of a bucket that is exchanged during the backward pass: smaller messages do not fill the network."""


def reduce_bucket(config: Config, own: int) -> int:
    """Elements of DeepSpeed's buffer for gradient exchange, on a rank with ``own`` parameters.

    DeepSpeed allocates the whole buffer, however small the model is; its default is half a billion elements. With
    parallel.overlap the buffer is a sixteenth of the model: DeepSpeed exchanges a full bucket during the backward pass,
    and a bucket for the whole model would be full only at the end of the pass.

    In two cases one bucket holds all gradients and is exchanged after the backward pass:

    - Context parallelism: its ranks are at different layers of the backward pass. An exchange in the middle would wait
      for ranks that themselves wait for the gradient of a memory state.
    - A wavefront without parallel.overlap: each layer copies its gradients into the bucket from its own stream, and an
      exchange in the middle would wait for the last layer's stream only.
    """
    if config.parallel.context > 1 or (config.train.wavefront and not config.parallel.overlap):
        return own
    usual = max(OVERLAPPED, own // 16) if config.parallel.overlap else 500_000_000
    return min(own, config.parallel.reduce_bucket or usual)


def deepspeed_config(config: Config, micro_batch: int, accumulation: int, own: int) -> dict[str, Any]:
    """DeepSpeed's own settings, all derived from the settings tree.

    The gradients of a step's micro-batches are summed in fp32 under every stage (see :func:`sums_in_fp32`).
    """
    parallel = config.parallel
    zero = {
        "stage": parallel.zero_stage, "reduce_bucket_size": reduce_bucket(config, own),
        "overlap_comm": parallel.overlap, "allgather_bucket_size": parallel.gather_bucket,
        "zero_hpz_partition_size": parallel.node_ranks,
        # Blocks share one compiled program, which assumes that every block's parameters are aligned as the first
        # block's are. In DeepSpeed's flat buffer, parameters after an odd number of gates would lose this alignment.
        "parameter_alignment": True if parallel.zero_stage < 3 else None,
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.train.clip,
        "bf16": {"enabled": config.train.precision == "bf16"},
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
        "communication_data_type": "fp32" if parallel.reduce_fp32 else None,
        "zero_allow_untested_optimizer": True,  # torch's AdamW, or a task's optimiser: nothing is compiled
        "data_types": {"grad_accum_dtype": "fp32" if sums_in_fp32(config, accumulation) else None},
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU twice in every micro-batch
        "wall_clock_breakdown": False,
    }


def sums_in_fp32(config: Config, accumulation: int) -> bool:
    """Whether gradients are kept in fp32 until the update. Under ZeRO 1 a single micro-batch needs no sum."""
    return config.parallel.zero_stage > 1 or accumulation > 1


def compiles(config: Config, device: torch.device) -> bool:
    """The value of train.compile; the default (None) is resolved."""
    if config.train.compile is not None:
        return config.train.compile
    if config.model.memory.write_cost:
        return False  # hooks, which read the gates, do not fire inside a compiled block
    parallel = config.parallel
    whole = parallel.zero_stage < 3 and parallel.tensor == parallel.context == 1
    return device.type == "cuda" and whole and config.train.wavefront is None


class ModelParallelUnit:
    """The grid of ranks in DeepSpeed's interface ("mpu"): ZeRO shards over replicas, norms sum over tensor ranks.

    It has no sequence group: with one, DeepSpeed would ignore its tensor parallelism.
    """

    def __init__(self, topology: Topology):
        tensor, replicas = topology.tensor, topology.replicas
        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = lambda: tensor.rank
        self.get_model_parallel_world_size = self.get_tensor_model_parallel_world_size = lambda: tensor.size
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: tensor.group
        self.get_data_parallel_rank = lambda: replicas.rank
        self.get_data_parallel_world_size = lambda: replicas.size
        self.get_data_parallel_group = lambda: replicas.group


class Engine:
    """A model under tensor parallelism and ZeRO 1, 2 or 3, with its optimiser.

    Args:
        task: provides the objective and the optimiser; the engine reads its settings train, data and parallel.
        model: fp32, with the same weights on every rank; the engine takes it over and cuts it to the rank's part.
        ranks: the process group, already initialised.
    """

    def __init__(self, task: Task, model: nn.Module, ranks: Ranks):
        config = task.config
        deepspeed = _import_deepspeed()
        parallel = config.parallel
        self.topology = Topology(parallel.tensor, parallel.context, ranks.rank, ranks.world_size, ranks.patience)
        self.micro_batch, self.accumulation = local_batch(config, self.topology.data.size)
        check_node_ranks(config, ranks.world_size)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.split = TensorParallel(model, self.topology.tensor, parallel.sequence)
        self._patterns = config.train.trainable
        freeze(model, self._patterns)  # after the cut, which puts hooks on gradients
        self.compiled = compiles(config, ranks.device)
        self.backbone = backbone_of(model)
        check_packages(self.backbone, ranks.device)
        self.backbone.set_activation_checkpointing(config.train.activation_checkpointing)
        self.backbone.set_wavefront(config.train.wavefront)
        self.backbone.set_compiled(self.compiled)
        if self.topology.context.size > 1:
            assert self.topology.host_context is not None
            self.backbone.put_on("context", Context(self.topology.context, self.topology.host_context))
        objective = task.objective(model, self.topology.tensor)
        p: Any  # DeepSpeed adds attributes to parameters
        for name, p in model.named_parameters():
            p.tensor_model_parallel = name in self.split.dims  # else DeepSpeed's norm counts only one rank's
        # bf16 training casts the module before DeepSpeed copies its fp32 masters from it: keep the exact weights.
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        optimizer = optimizer_of(task, model, ranks.device)
        self._linear = F.linear
        with _one_optimizer_for_all_stages(), self._linear_of_zero():
            self._engine, *_ = deepspeed.initialize(
                model=objective,
                optimizer=optimizer,
                config=deepspeed_config(config, self.micro_batch, self.accumulation, trained(model)),
                mpu=ModelParallelUnit(self.topology),
                dist_init_required=False,
            )
            self._linear = F.linear
        self.masters = Masters(self._engine, weights, self.split, self.topology, task)

    @property
    def model(self) -> nn.Module:
        return self._engine.module.model

    def set_lr(self, lr: float):
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    def micro_step(
        self, batch: Sequence[Tensor | None], done: Callable[[str], None] = lambda part: None,
        refuse: Callable[[Tensor], bool] | None = None,
    ) -> Tensor:  # fmt: skip
        """Forward and backward of one micro-batch; the ``accumulation``-th call of a step also updates the weights.

        Args:
            batch: the arguments of the task's objective.
            done: called with "forward", "backward" and "update" as each ends.
            refuse: called with the loss after the forward pass. If it returns True on any rank, the gradients become
                NaN and the step is skipped.

        Returns:
            The micro-batch's mean loss, a detached fp32 scalar on the device.
        """
        with self._linear_of_zero():
            loss = self._engine(*batch)
            if not loss.requires_grad:
                raise UserError(f"train.trainable: given {self._patterns}; the loss depends on none of these "
                                "parameters; name others, or leave it out to train all")  # fmt: skip
            done("forward")
            refused = refuse is not None and refuse(loss.detach())
            self._engine.backward(loss * math.nan if refused else loss)
            done("backward")
            self._engine.step()
            done("update")
        if self._engine.micro_steps % self.accumulation == 0 and self.update_applied():
            self.masters.updates += 1
        return loss.detach()

    def update_applied(self) -> bool:
        """False if the last step's gradient norm was not finite: weights and the optimiser's state are then unchanged.

        DeepSpeed decides this from the norm over all ranks, under every stage, in fp32 and in bf16.
        """
        return self._engine.was_step_applied()

    def gradient_norm(self) -> float:
        """Global gradient norm of the last step, before clipping; inf for a step that was skipped."""
        return float(self._engine.get_global_grad_norm())

    @contextlib.contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """Context in which the model is in evaluation mode and gradients are off."""
        self._engine.eval()
        with torch.no_grad(), self._linear_of_zero():
            yield self.model
        self._engine.train()

    def validate(self, batches: Iterable[tuple[Sequence[Tensor | None], Tensor]]) -> tuple[dict[str, float], float]:
        """This rank's (weighted sums of figures by name, sum of weights) over (batch, weight (B,)) pairs.

        Every rank must bring the same number of batches: under ZeRO 3 a forward pass is collective.
        """
        totals: dict[str, float] = {}
        count = 0.0
        with self.reading():
            for batch, weight in batches:
                samples = float(weight.sum())
                for name, figure in self._engine(*batch, weight=weight).items():
                    totals[name] = totals.get(name, 0.0) + float(figure) * samples
                count += samples
        return totals, count

    @contextlib.contextmanager
    def _linear_of_zero(self) -> Iterator[None]:
        """Context in which F.linear is what DeepSpeed made of it: under ZeRO 3 one that keeps no gathered weights.

        DeepSpeed replaces it for good, and with it the plans, models and gradients of the rest of the process.
        """
        plain, F.linear = F.linear, self._linear
        try:
            yield
        finally:
            F.linear = plain


@contextlib.contextmanager
def _one_optimizer_for_all_stages() -> Iterator[None]:
    """Lets DeepSpeed sum bf16 gradients in fp32 under ZeRO 1 with ZeRO's own optimizer.

    ZeRO's own optimizer can do this, as with offloading. Without offloading DeepSpeed chooses another optimizer, which
    does not skip non-finite steps. Summed in bf16, 256 micro-batches lose 2 % of the gradient.
    """
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    choose = DeepSpeedEngine._do_optimizer_sanity_check
    DeepSpeedEngine._do_optimizer_sanity_check = lambda engine, optimizer: ZERO_OPTIMIZATION
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = choose


def _import_deepspeed():
    """Imports DeepSpeed quietly, on the CPU if there is no GPU, and without compiling anything during the import.

    The import takes seconds; only runs that train pay for it.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.runtime import compiler
    from deepspeed.utils import logger

    # Any ZeRO stage would compile a function of DeepSpeed's Muon, unused here: importing the compiler takes 2 s.
    compiler.compile = lambda: lambda function: function

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # calls DeepSpeed makes
    if not torch.cuda.is_available():
        # Else DeepSpeed builds a C++ all-reduce for inference at a machine's first start, and fails without a compiler.
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
