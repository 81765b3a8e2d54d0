"""Loading a trained model with its task and settings from a run's folder."""

import json
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
from titans_pt.config.history import without_gone
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
    """A trained model with its task, settings and checkpoint."""

    folder: RunFolder
    config: Config
    model: nn.Module
    """Model in eval mode, on the requested device."""
    task: Task
    """The task, restored with the files that it keeps in the folder."""
    step: int
    checkpoint_hash: str
    precision: str
    """Precision of the model's parameters, "bf16" or "fp32"."""
    out: RunFolder | None = None
    """Folder of results instead of the run's own."""
    caching: ReadCachingConfig | None = None
    """Caches that an evaluation put on the model's memories (evaluation.caching)."""

    @property
    def results(self) -> RunFolder:
        """The folder that gets results and pictures."""
        return self.out or self.folder

    @property
    def read_last(self) -> int | None:
        """Tokens at the end of a prompt that read caches (evaluation.caching.last); None: all."""
        return None if self.caching is None else self.caching.last

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
        """Identity that evaluation results belong to: weights, precision and read caches."""
        found = self.checkpoint_hash if self.precision == "fp32" else f"{self.checkpoint_hash}-{self.precision}"
        return found if self.caching is None else f"{found}-{self.caching.model_dump_json()}"


def load_run(
    path: str | Path,
    step: int | None = None,
    device: str | torch.device = "cpu",
    overrides: Sequence[str] = (),
    precision: str | None = None,
    content: bool = True,
) -> LoadedRun:
    """Loads a run's model and task without DeepSpeed, from checkpoint ``step``; None: the newest complete
    one, with train.patience the best.

    Args:
        overrides: ``evaluation.KEY=VALUE`` settings, which replace the run's own.
        precision: "bf16" or "fp32"; None: evaluation.precision.
        content: False: compare only the sizes of the checkpoint's files with what was written.

    Raises:
        UserError: not a run folder, no checkpoint or a damaged one, or the tokenizer or model settings changed since
            training.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise UserError(f"{folder.path}: not a run folder (no {folder.config.name}); name a training run's run.dir")
    folder.check_settings()
    config = load_stored(folder.config, overrides)
    return checkpoints.undisturbed(folder.checkpoints, lambda: _load(folder, config, step, device, precision, content))


def _load(
    folder: RunFolder,
    config: Config,
    step: int | None,
    device: str | torch.device,
    precision: str | None,
    content: bool,
) -> LoadedRun:
    """:func:`load_run` with the run's settings."""
    checkpoint = checkpoints.find(folder.checkpoints, step, content)
    state = checkpoints.read_state(checkpoint)
    trained = completed(state.config)
    for key, was, now in differences(trained["model"], config.model.model_dump(mode="json")):
        raise UserError(f"model.{key}: given {now!r}, but {checkpoint} was trained with {was!r}; leave it as it is")
    task = task_of(config)
    task.restore(folder, state.identity)
    model = task.build_model()
    check_packages(backbone_of(model), torch.device(device))
    load_weights(model, checkpoints.read_weights(checkpoint))
    # The checkpoint's own train.max_steps: a later start of the run may have raised it.
    backbone_of(model).set_progress(state.step / trained["train"]["max_steps"])
    backbone_of(model).set_wavefront(config.evaluation.wavefront)
    usual = config.train.precision if torch.device(device).type == "cuda" else "fp32"
    precision = precision or config.evaluation.precision or usual
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    return LoadedRun(
        folder, config, model.to(device, dtype).eval(), task, state.step, checkpoints.checkpoint_hash(checkpoint),
        precision,
    )  # fmt: skip


def save_reading(run: LoadedRun, logits: torch.Tensor, state: Any, unfinished: bytes, path: str | Path):
    """Writes the state of a run's model after reading, to be continued with the same weights.

    Args:
        logits: (1, V), logits of the last token.
        state: the model's state after that token.
        unfinished: bytes of a character that the last token has left incomplete.
    """
    save_state((logits, state), path, _about(run) | {"unfinished": unfinished.hex()})


def load_reading(run: LoadedRun, path: str | Path) -> tuple[torch.Tensor, Any, bytes]:
    """Reads the logits (1, V), state and bytes that :func:`save_reading` wrote with the same weights.

    Raises:
        UserError: the file is of another kind, is damaged, or belongs to another model or checkpoint.
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
    was = _caches(about)
    if was != expected["caching"]:
        raise UserError(f"{path}: saved with other caches; give the same, evaluation.caching={was or 'null'}")
    return *load_state(path, device_of(run.model)), bytes.fromhex(about.get("unfinished", ""))


def _about(run: LoadedRun) -> dict[str, str]:
    """Identifies the model, weights and caches that a saved state belongs to."""
    caching = run.caching.model_dump_json(exclude={"last"}) if run.caching else ""
    about = {"kind": "generation", "model": config_hash(run.config.model), "checkpoint": run.checkpoint_hash}
    return about | {"caching": caching}


def _caches(about: dict[str, str]) -> str:
    """The caches of a saved state, as this version writes them."""
    text = about.get("caching", "")
    try:
        stored = without_gone({"evaluation": {"caching": json.loads(text)}})["evaluation"]["caching"]
        return ReadCachingConfig.model_validate(stored).model_dump_json(exclude={"last"})
    except ValueError:  # none, or those of a later version
        return text


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Fills a model with the weights of a checkpoint, whose names must match the model's exactly.

    A parameter with two names (tied embeddings) is stored under its first name.

    Raises:
        UserError: the names differ, because an earlier version of this project with other parameters wrote them.
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
    """The first ``rows`` rows of a matrix, or all of its rows padded with zeros."""
    return F.pad(weight, (0, 0, 0, rows - len(weight)))


def differences(old: dict, new: dict, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yields (dotted key, old value, new value) for every difference between two settings trees."""
    for key in old | new:
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key}", was, now
