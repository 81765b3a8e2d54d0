"""The contract of a task: everything around the backbone, and all that training and evaluation use of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from titans_pt.config import Config, NoSettings, Section
from titans_pt.models.backbone import Backbone
from titans_pt.models.mixers.base import Need
from titans_pt.parallel import RankGroup
from titans_pt.registry import Registry
from titans_pt.runs.folder import RunFolder

TASKS: "Registry[type[Task]]" = Registry("titans_pt.tasks", "task")
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
        """The arrays of one sample, whose shapes are the same at every position: batches are stacks of them."""

    def describe(self, position: int) -> dict:
        """Origin of the sample, for the record of a step whose loss was not finite."""


@dataclass(frozen=True)
class TaskData:
    """train, validation: samples of data.seq_len steps each; those of validation are read from position 0 on.

    identity: name -> hash of what must be unchanged to continue from a checkpoint (the data, a tokenizer).
    baseline: the loss of a trivial model, shown in the loss curve; None: there is none.
    sources: where train is a mixture, name of each source -> (its samples in an epoch, its share of what is read).
    """

    train: Samples
    validation: Samples
    identity: dict[str, str]
    baseline: float | None = None
    sources: dict[str, tuple[int, float]] = field(default_factory=dict)


class Task:
    """One thing to learn: its data, the model's ends around the backbone, its loss, its figures and evaluations.

    A task is one file: it subclasses this, is decorated with ``@TASKS.register``, and nothing outside knows its name.
    docs/architecture.md has the recipe. An instance is cheap: files are opened by :meth:`open` and :meth:`restore`.
    """

    name: ClassVar[str]
    """Name of the task in the setting ``task``."""
    Settings: ClassVar[type[Section]] = NoSettings
    """Its own section of the settings, of its name."""
    unit: ClassVar[str]
    """Unit of the loss in messages, such as "nats per token"."""
    baseline_name: str = "baseline"
    """Name of :attr:`TaskData.baseline` in messages."""
    figures: ClassVar[tuple[str, ...]] = ("loss",)
    """Figures of validation samples that the objective reports, for train.stop_when; those with a loss in their name
    fall."""
    suites: dict[str, str] = {}
    """Evaluation suites: name -> "module:class", imported when it is asked for (titans_pt.evaluation.runner)."""
    usual: tuple[str, ...] = ()
    """Suites that run when none is named."""

    bound: ClassVar[dict[str, str]] = {}
    """Entry of :attr:`TaskData.identity` -> the parameter that means something else under another one: train.init_from
    takes it only where the entry is the same."""
    begins: tuple[int, int] = (0, 0)
    """Samples read, and steps taken, where this process goes on with a training; another batch may have read them."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Other tasks whose weights train.init_from accepts."""
    own_end: ClassVar[tuple[str, ...]] = ()
    """Patterns of parameters that train.init_from never fills: an output end whose meaning is another in every run."""

    def __init__(self, config: Config):
        self.config = config
        self.settings = self.Settings.model_validate(config.section(self.name))

    @classmethod
    def check(cls, config: Config, need: Need):
        """Calls ``need`` for everything that must hold between its settings and the rest of the tree."""

    # ---- the model

    def build_model(self) -> nn.Module:
        """Input end, one :class:`Backbone`, output end; fp32, from torch's global generator.

        It has ``flops(length) -> Flops`` per step of a sequence, and declares ``sharding`` of its ends.
        """
        raise NotImplementedError

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        """A module around ``model`` (its attribute of that name), so that an engine sees one forward call.

        ``forward(*batch) -> loss``, an fp32 scalar, the mean over the batch; NaN where it is not finite, so that every
        gradient is. ``forward(*batch, weight=w) -> {"loss": ..., other figures}`` for validation: fp32 scalars, means
        of the samples with the weights w (B,).

        Args:
            tensor: the ranks that the model is cut over; one of size 1 where it is whole.
        """
        raise NotImplementedError

    def sequences(self, rows: int, length: int) -> tuple[int, int]:
        """(rows, tokens of each) that the backbone reads of ``rows`` samples of ``length`` steps, for the plan."""
        return rows, length

    def output_bytes(self, rows: int, length: int, width: int) -> dict[str, int]:
        """Kind -> bytes that the output end and the loss hold for a micro-batch per tensor rank, for the plan.

        Args:
            width: bytes of a number in training precision.
        """
        return {}

    # ---- data

    def prepare(self, force: bool = False):
        """Makes what :meth:`open` reads, where it is missing and can be made from the settings alone.

        Args:
            force: replace what other settings or sources made.
        """

    def open(self) -> TaskData:
        """
        Raises:
            UserError: the data is missing, or does not go with the settings.
        """
        raise NotImplementedError

    def cut(self, batch: tuple[Tensor, ...], part: int, parts: int) -> tuple[Tensor, ...]:
        """Return one of ``parts`` equal slices of a loaded batch along time, with all that the loss of its steps needs.
        A task that does not define it refuses parallel.context > 1."""
        assert parts == 1
        return batch

    def to_device(self, batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor | None, ...]:
        """A batch as the loader made it -> what :meth:`objective` is called with."""
        return tuple(part.to(device, non_blocking=True) for part in batch)

    def differs(self, key: str, path: Path, was: str, now: str) -> str:
        """Message for an entry ``key`` of the identity that is not that of the checkpoint ``path``: one line that names
        the setting; the remedy (put it back, or another run.dir) is added."""
        return f"{key}: {now[:12]}... is not the {key} that {path} was trained with ({was[:12]}...)"

    # ---- the run's folder

    def keep(self, folder: RunFolder):
        """Writes what evaluation needs besides the weights to a run's folder."""

    def restore(self, folder: RunFolder, identity: dict[str, str]):
        """Reads it again, for evaluation.

        Raises:
            UserError: it is missing, or not that of ``identity``, which the checkpoint has.
        """


def task_of(config: Config) -> Task:
    """The task that the setting ``task`` names, with these settings. It is built once and passed on."""
    return TASKS.find(config.task)(config)


def backbone_of(model: nn.Module) -> Backbone:
    """The one backbone of a task's model."""
    (found,) = [module for module in model.modules() if isinstance(module, Backbone)]
    return found


def refuse(config: Config, need: Need, name: str, *paths: str):
    """Refuses settings that the task ``name`` does not serve: all that are set, or true, or above 0."""
    for path in paths:
        given: Any = config
        for key in path.split("."):
            given = getattr(given, key)
        need(not given, path, given, f"not with task={name}; leave it out")


def with_weights(losses: Tensor, weight: Tensor) -> Tensor:
    """Mean of (B,) figures with the weights (B,), fp32; 0 where all weights are."""
    return (losses * weight).sum() / weight.sum().clamp(min=torch.finfo(torch.float32).tiny)


def nan_unless_finite(loss: Any) -> Any:
    """The loss; NaN where it is infinite. Its gradients are then NaN on every parameter, and the one check of the
    gradient norm decides for all ranks."""
    return loss * (1.0 + 0.0 * loss.detach())
