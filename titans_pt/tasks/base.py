"""The contract of a task: everything around the backbone that training and evaluation use."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from titans_pt.config import Config, NoSettings, Section
from titans_pt.models.backbone import Backbone, parameter_groups, with_matrices
from titans_pt.models.mixers.base import Need
from titans_pt.parallel import RankGroup
from titans_pt.parallel.muon import Muon
from titans_pt.registry import Registry
from titans_pt.runs.folder import RunFolder

TASKS: "Registry[Task]" = Registry("titans_pt.tasks", "task")
"""Every task by the name that the setting ``task`` gives it."""


class Samples(Protocol):
    """Samples in an order that is a function of the position alone, so that a run's place in the data is one number.

    seq_len: steps of a sample, data.seq_len.
    """

    seq_len: int

    def __len__(self) -> int:
        """Samples of one epoch; positions continue beyond it."""
        ...

    def sample(self, position: int) -> tuple[np.ndarray, ...]:
        """Arrays of one sample. Their shapes are the same at every position, because a batch stacks them."""

    def describe(self, position: int) -> dict:
        """Origin of the sample, for the record of a step whose loss was not finite."""


@dataclass(frozen=True)
class TaskData:
    """A task's data.

    train, validation: samples of data.seq_len steps each; validation is read from position 0 on.
    identity: name -> hash of a thing that must not change between a checkpoint and its continuation (data, tokenizer).
    baseline: the loss of a trivial model, shown in the loss curve; None: there is none.
    sources: if train is a mixture, name of each source -> (its samples in an epoch, its share of the samples read).
    """

    train: Samples
    validation: Samples
    identity: dict[str, str]
    baseline: float | None = None
    sources: dict[str, tuple[int, float]] = field(default_factory=dict)


class Task:
    """One thing to learn: its data, the model's ends around the backbone, its loss, its figures and evaluations.

    A task is one file with a subclass decorated with ``@TASKS.register``; no other code knows its name.
    docs/architecture.md has the recipe. An instance is cheap: files are opened by :meth:`open` and :meth:`restore`.
    """

    name: ClassVar[str]
    """Name of the task in the setting ``task``."""
    Settings: ClassVar[type[Section]] = NoSettings
    """The task's own section of the settings, named after the task."""
    unit: ClassVar[str]
    """Unit of the loss in messages, such as "nats per token"."""
    baseline_name: str = "baseline"
    """Name of :attr:`TaskData.baseline` in messages."""
    figures: ClassVar[tuple[str, ...]] = ("loss",)
    """Figures that the objective reports for validation samples, or :meth:`after_validation`, for train.stop_when. A
    figure with loss in its name falls in training."""
    suites: dict[str, str] = {}
    """Evaluation suites: name -> "module:class", imported on demand (titans_pt.evaluation.runner)."""
    usual: tuple[str, ...] = ()
    """Suites that run when none is named."""

    bound: ClassVar[dict[str, str]] = {}
    """Entry of :attr:`TaskData.identity` -> the parameter whose meaning depends on it. train.init_from takes the
    parameter only if the entry is the same."""
    begins: tuple[int, int] = (0, 0)
    """Samples read and steps taken before this process resumed the training, perhaps with another batch size."""
    takes: tuple[str, ...] = ()
    """Other tasks whose weights train.init_from accepts."""
    own_end: ClassVar[tuple[str, ...]] = ()
    """Patterns of parameters that train.init_from never fills: an output end whose meaning differs from run to run."""

    def __init__(self, config: Config):
        self.config = config
        self.settings = self.Settings.model_validate(config.section(self.name))

    @classmethod
    def check(cls, config: Config, need: Need):
        """Call ``need`` for every condition between the task's settings and the rest of the config."""

    # ---- the model

    def build_model(self) -> nn.Module:
        """Build the model: input end, one :class:`Backbone`, output end; fp32, drawn from torch's global generator.

        The model has ``flops(length) -> Flops`` per step of a sequence, and declares ``sharding`` of its ends.
        """
        raise NotImplementedError

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        """Wrap ``model``, as the attribute ``model``, in a module with the loss: an engine then sees one forward call.

        ``forward(*batch) -> loss`` is an fp32 scalar, the mean over the batch. A loss that is not finite is NaN, which
        makes every gradient NaN. ``forward(*batch, weight=w) -> {"loss": ..., other figures}`` is for validation: fp32
        scalars, means over the samples with the weights w (B,).

        Args:
            tensor: the ranks that the model is sharded over; a group of size 1 if it is whole.
        """
        raise NotImplementedError

    def sequences(self, rows: int, length: int) -> tuple[int, int]:
        """Return (rows, tokens per row) that the backbone reads of ``rows`` samples of ``length`` steps, for the
        plan."""
        return rows, length

    def output_bytes(self, rows: int, length: int, width: int) -> dict[str, int]:
        """Return kind -> bytes that the output end and the loss hold per micro-batch and tensor rank, for the plan.

        Args:
            width: bytes of a number in training precision.
        """
        return {}

    # ---- data

    def prepare(self, force: bool = False):
        """Make the files that :meth:`open` reads, if they are missing and can be made from the settings alone.

        Args:
            force: replace files made with other settings or sources.
        """

    def open(self) -> TaskData:
        """
        Raises:
            UserError: the data is missing, or does not match the settings.
        """
        raise NotImplementedError

    def cut(self, batch: tuple[Tensor, ...], part: int, parts: int) -> tuple[Tensor, ...]:
        """Return one of ``parts`` equal slices of a loaded batch along time, with all that the loss of its steps needs.
        A task that does not define it refuses parallel.context > 1."""
        assert parts == 1
        return batch

    def to_device(self, batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor | None, ...]:
        """Turn a loaded batch into the arguments of the objective's forward, on ``device``."""
        return tuple(part.to(device, non_blocking=True) for part in batch)

    def differs(self, key: str, path: Path, was: str, now: str) -> str:
        """Message for an identity entry ``key`` that differs from the checkpoint ``path``: one line that names the
        setting. The caller adds the remedy (put it back, or another run.dir)."""
        return f"{key}: {now[:12]}... is not the {key} that {path} was trained with ({was[:12]}...)"

    # ---- during a training

    def optimizer(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """Build the optimiser of the parameters that require gradients: the one of train.optimizer.

        ZeRO gives it flat pieces of the weights (fp32, one dimension), several parameters in a piece. It must therefore
        treat every weight by itself, as AdamW, RMSprop or SGD do; Adafactor and Shampoo need whole matrices. Its state,
        which checkpoints hold, consists of numbers per weight, and a count "step". An update with zero gradients at
        lr=0 creates this state. Others are refused after test updates (titans_pt.training.optimizers). "lr_scale" of a
        parameter group multiplies the learning rate of all steps.

        Args:
            model: this rank's part of the model that :meth:`build_model` made.
            device: where the pieces will be.
        """
        train = self.config.train
        groups = parameter_groups(model, train.weight_decay)
        # On a GPU one kernel reads and writes weights and moments once. PyTorch's default there makes a dozen passes
        # over them, and a temporary tensor of a moment's size.
        fused = True if device.type == "cuda" else None
        rest: Any = {"lr": train.lr, "betas": tuple(train.betas), "eps": train.eps, "fused": fused}
        if train.optimizer == "adamw":
            return torch.optim.AdamW(groups, **rest)
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        return Muon(with_matrices(groups, model), train.momentum, dtype, **rest)

    def learning_rate(self, step: int, usual: float) -> float:
        """Return the learning rate of optimiser step ``step`` (the first step is 1).

        It may depend on the step and the settings alone: a resumed training then goes on as if undisturbed.

        Args:
            usual: the rate of train.schedule.
        """
        return usual

    def after_validation(self, model: nn.Module, step: int, figures: dict[str, float]) -> dict[str, float]:
        """Use the model after a validation. Return further figures by name, for the log and train.stop_when (which
        takes those that :attr:`figures` names); rank 0's count.

        Every rank calls it, with the same arguments. A model that is sharded (parallel.tensor, ZeRO 3) exchanges
        tensors in its forward pass: all ranks must make the same calls. A resumed training may call it again for the
        step at which it was stopped.

        Args:
            model: the one that :meth:`build_model` made, in evaluation mode; gradients are off.
            step: number of steps taken.
            figures: those of the objective, means over the validation samples.
        """
        return {}

    # ---- the run's folder

    def keep(self, folder: RunFolder):
        """Write the files that evaluation needs besides the weights to a run's folder."""

    def restore(self, folder: RunFolder, identity: dict[str, str]):
        """Read the files of :meth:`keep`, for evaluation.

        Raises:
            UserError: a file is missing, or does not match ``identity``, which the checkpoint holds.
        """


def task_of(config: Config) -> Task:
    """Build the task that the setting ``task`` names, with these settings. Callers build it once and pass it on."""
    return TASKS.find(config.task)(config)


def backbone_of(model: nn.Module) -> Backbone:
    """The one backbone of a task's model."""
    (found,) = [module for module in model.modules() if isinstance(module, Backbone)]
    return found


def refuse(config: Config, need: Need, name: str, *paths: str):
    """Refuse those settings of ``paths`` that are set, true or above 0: the task ``name`` does not support them."""
    for path in paths:
        given: Any = config
        for key in path.split("."):
            given = getattr(given, key)
        need(not given, path, given, f"not with task={name}; leave it out")


def with_weights(losses: Tensor, weight: Tensor) -> Tensor:
    """Mean of (B,) figures with the weights (B,), fp32; 0 if all weights are 0."""
    return (losses * weight).sum() / weight.sum().clamp(min=torch.finfo(torch.float32).tiny)


def nan_unless_finite(loss: Any) -> Any:
    """Return the loss, or NaN if it is infinite. The gradients of every parameter are then NaN, and one check of the
    gradient norm decides for all ranks."""
    return loss * (1.0 + 0.0 * loss.detach())
