"""A trained model and what belongs to it, loaded from a run's folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from titans_pt.config import Config, ReadCachingConfig, config_hash
from titans_pt.config.checks import completed
from titans_pt.config.files import load_stored
from titans_pt.errors import UserError
from titans_pt.models.backbone import check_packages
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.states import load_state, read_about, save_state
from titans_pt.streaming import device_of
from titans_pt.tasks import Task, task_of
from titans_pt.tasks.base import backbone_of


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and all that belongs to it."""

    folder: RunFolder
    config: Config
    model: nn.Module
    """Model in eval mode, on the device asked for."""
    task: Task
    """Restored: with what it keeps in the folder."""
    step: int
    checkpoint_hash: str
    precision: str
    """"bf16" or "fp32", of the model's parameters."""
    out: RunFolder | None = None
    """Folder of results instead of the run's own."""
    caching: ReadCachingConfig | None = None
    """Caches that were put on its memories for an evaluation (evaluation.caching)."""

    @property
    def results(self) -> RunFolder:
        """The folder that gets results and pictures."""
        return self.out or self.folder

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that a language model was trained with.

        Raises:
            UserError: the run's task has no text.
        """
        if not hasattr(self.task, "tokenizer"):
            raise UserError(f"{self.folder.path}: trained for the task {self.task.name!r}, which has no text; name the "
                            "folder of a language model's run")  # fmt: skip
        return self.task.tokenizer

    @property
    def identity(self) -> str:
        """Owner of evaluation results: the weights, the precision of computing with them, caches put on them."""
        found = self.checkpoint_hash if self.precision == "fp32" else f"{self.checkpoint_hash}-{self.precision}"
        return found if self.caching is None else f"{found}-{self.caching.model_dump_json()}"


def load_run(
    path: str | Path,
    step: int | None = None,
    device: str | torch.device = "cpu",
    overrides: Sequence[str] = (),
    precision: str | None = None,
) -> LoadedRun:
    """Model and tokenizer of a run, from checkpoint ``step`` or the newest complete one, without DeepSpeed.

    Args:
        overrides: ``evaluation.KEY=VALUE`` settings, over those that the run was started with.
        precision: "bf16" or "fp32"; None is evaluation.precision.

    Raises:
        UserError: not a run folder, no checkpoint, a damaged one, another tokenizer or model than it was trained with.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise UserError(f"{folder.path}: not a run folder (no {folder.config.name}); name a training run's run.dir")
    folder.check_settings()
    config = load_stored(folder.config, overrides)
    checkpoint = checkpoints.find(folder.checkpoints, step)
    state = checkpoints.read_state(checkpoint)
    for key, was, now in differences(completed(state.config)["model"], config.model.model_dump(mode="json")):
        raise UserError(f"model.{key}: given {now!r}, but {checkpoint} was trained with {was!r}; leave it as it is")
    task = task_of(config)
    task.restore(folder, state.identity)
    model = task.build_model()
    check_packages(backbone_of(model), torch.device(device))
    load_weights(model, checkpoints.read_weights(checkpoint))
    # The checkpoint's own train.max_steps: a later start of the run may have raised it.
    backbone_of(model).set_progress(state.step / completed(state.config)["train"]["max_steps"])
    backbone_of(model).set_wavefront(config.evaluation.wavefront)
    usual = config.train.precision if torch.device(device).type == "cuda" else "fp32"
    precision = precision or config.evaluation.precision or usual
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    return LoadedRun(
        folder, config, model.to(device, dtype).eval(), task, state.step, checkpoints.checkpoint_hash(checkpoint),
        precision,
    )  # fmt: skip


def save_reading(run: LoadedRun, logits: torch.Tensor, state: Any, unfinished: bytes, path: str | Path):
    """Writes what a run's model has read, to be continued with the same weights.

    Args:
        logits: (1, V), and the state after them.
        unfinished: bytes of a character that the last token has left incomplete.
    """
    save_state((logits, state), path, _about(run) | {"unfinished": unfinished.hex()})


def load_reading(run: LoadedRun, path: str | Path) -> tuple[torch.Tensor, Any, bytes]:
    """The logits (1, V), the state and the bytes that :func:`save_reading` wrote with the same weights.

    Raises:
        UserError: not such a file, a damaged one, or one of another model or checkpoint.
    """
    about, expected = read_about(path), _about(run)
    if about.get("kind") != expected["kind"]:
        raise UserError(f"{path}: a state, but not one that titans generate --save-state wrote; write one with it")
    # Equal checkpoints are equal models, although a version with more settings hashes them differently.
    if about["checkpoint"] != expected["checkpoint"]:
        if about["model"] != expected["model"]:
            raise UserError(f"{path}: saved by a model of other settings; name the run that it was saved with")
        raise UserError(
            f"{path}: saved with another checkpoint than step {run.step} of {run.folder.path}; "
            "name that one with --checkpoint STEP, or that run"
        )
    if about.get("caching", "") != expected["caching"]:
        was = about.get("caching") or "null"
        raise UserError(f"{path}: saved with other caches; give the same, evaluation.caching={was}")
    return *load_state(path, device_of(run.model)), bytes.fromhex(about.get("unfinished", ""))


def _about(run: LoadedRun) -> dict[str, str]:
    """Owner of a saved state: this model with these weights and caches."""
    caching = run.caching.model_dump_json(exclude={"last"}) if run.caching else ""
    about = {"kind": "generation", "model": config_hash(run.config.model), "checkpoint": run.checkpoint_hash}
    return about | {"caching": caching}


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Fills a model with the weights of a checkpoint, whose names must be exactly the model's.

    A parameter with two names (tied embeddings) is kept under its first one.

    Raises:
        UserError: the names differ: an earlier version of this project, whose models had other parameters, wrote them.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    aliases = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    weights = weights | {name: weights[first] for name, first in aliases.items() if first in weights}
    if different := sorted(weights.keys() ^ model.state_dict().keys()):
        raise UserError(
            f"the checkpoint is of another version of this project: {len(different)} parameters differ, such as "
            f"{different[0]}; use the version that versions.json of its run folder names, or train it again"
        )
    model.load_state_dict(weights, strict=True)


def with_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """The first ``rows`` rows of a matrix, or all of its rows and zeros behind them."""
    return F.pad(weight, (0, 0, 0, rows - len(weight)))


def differences(old: dict, new: dict, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted key, old value, new value) of every difference between two trees of settings."""
    for key in old | new:
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key}", was, now
