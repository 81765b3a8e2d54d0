"""A run is a folder: everything that can be looked at later is in it."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from titans_pt import __version__, checkpoints
from titans_pt.config import Config, completed, config_hash
from titans_pt.config_file import load_config, resolved_yaml
from titans_pt.errors import UserError

log = logging.getLogger(__name__)
_PACKAGES = ("torch", "deepspeed", "numpy", "pydantic", "safetensors", "sentencepiece", "triton", "wandb")


class RunFolder:
    """The paths of a run folder, and what is written there once."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.evaluation = self.path / "evaluation"
        self.plots = self.path / "plots"
        self.profile = self.path / "profile"
        self.wandb = self.path / "wandb"

    @property
    def tokenizer(self) -> Path:
        """tokenizer.model or tokenizer.json, whichever the run was trained with."""
        from titans_pt.data_pipeline import saved_tokenizer

        return saved_tokenizer(self.path)

    @contextlib.contextmanager
    def lock(self):
        """Holds the folder for one training process; the system lets go of it even when that is killed.

        The lock is the kernel's (flock), so it also holds between nodes where the file system passes it on, as NFS
        and Lustre do; where there are none, a warning says so.

        Raises:
            UserError: another run is at work in this folder, or it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            raise UserError(
                f"run.dir: {error.filename}: {error.strerror}; set run.dir to a folder you may write to"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"run.dir: {self.path} is in use by another run ({file.read().strip() or 'just starting'}); wait "
                    "for it to end, or set another run.dir"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                log.warning("%s: its file system has no locks (%s); a second run here would not be noticed",
                            self.path, error.strerror)  # fmt: skip
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            file.flush()
            yield self

    @contextlib.contextmanager
    def opened(self):
        """:meth:`lock`, with our log going to ``log``, warnings to stderr as well."""
        with self.lock():
            ours = logging.getLogger("titans_pt")
            to_file, to_screen = logging.FileHandler(self.log), logging.StreamHandler()
            to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            to_screen.setFormatter(logging.Formatter("titans: %(levelname)s: %(message)s"))
            to_screen.setLevel(logging.WARNING)
            before = ours.level
            ours.setLevel(logging.INFO)
            for handler in (to_file, to_screen):
                ours.addHandler(handler)
            try:
                yield self
            except BaseException as error:
                ours.info("stopped: %s: %s", type(error).__name__, error)
                raise
            finally:
                ours.setLevel(before)
                for handler in (to_file, to_screen):
                    ours.removeHandler(handler)
                    handler.close()

    def write_settings(self, config: Config, tokenizer: Path):
        """config.yaml (resolved; its hash in a comment), versions.json and a copy of the tokenizer."""
        self.config.write_text(f"# sha256 of the settings: {config_hash(config)}\n{resolved_yaml(config)}")
        self.versions.write_text(json.dumps(versions(), indent=1) + "\n")
        if Path(tokenizer).resolve() != self.tokenizer.resolve():
            from titans_pt.data_pipeline import load_tokenizer

            load_tokenizer(tokenizer, config.data.tokenizer.eos_token).save(self.path)


def versions() -> dict[str, str]:
    """Versions of what a result depends on, and the machine's processors."""
    found = {"titans_pt": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["platform"] = platform.platform()
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return found


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and all that goes with it."""

    folder: RunFolder
    config: Config
    model: nn.Module
    """In eval mode, on the device asked for."""
    tokenizer: object
    """A data_pipeline tokenizer, the one that the model was trained with."""
    step: int
    checkpoint_hash: str
    precision: str
    """"bf16" or "fp32", of the model's parameters."""

    @property
    def identity(self) -> str:
        """What the results of evaluations belong to: the weights, and how they are computed with."""
        return self.checkpoint_hash if self.precision == "fp32" else f"{self.checkpoint_hash}-{self.precision}"


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
    from titans_pt.data_pipeline import load_tokenizer
    from titans_pt.models import build_model

    folder = RunFolder(path)
    if not folder.config.is_file():
        raise UserError(f"{folder.path}: not a run folder (no {folder.config.name}); name a training run's run.dir")
    config = load_config(folder.config, overrides)
    checkpoint = checkpoints.find(folder.checkpoints, step)
    state = checkpoints.read_state(checkpoint)
    for key, was, now in differences(completed(state.config)["model"], config.model.model_dump(mode="json")):
        raise UserError(f"model.{key}: given {now!r}, but {checkpoint} was trained with {was!r}; leave it as it is")
    if not folder.tokenizer.is_file():
        raise UserError(f"{folder.tokenizer}: missing; copy the tokenizer of the run's data.dir there")
    found = hashlib.sha256(folder.tokenizer.read_bytes()).hexdigest()
    if found != state.tokenizer_sha256:
        raise UserError(
            f"{folder.tokenizer}: not the tokenizer of this model (sha256 {found[:12]}..., trained with "
            f"{state.tokenizer_sha256[:12]}...); put back the one that the run was trained with"
        )
    model = build_model(config.model)
    load_weights(model, checkpoints.read_tensors(checkpoint / checkpoints.MODEL))
    usual = config.train.precision if torch.device(device).type == "cuda" else "fp32"
    precision = precision or config.evaluation.precision or usual
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    return LoadedRun(
        folder, config, model.to(device, dtype).eval(),
        load_tokenizer(folder.tokenizer, config.data.tokenizer.eos_token), state.step,
        checkpoints.checkpoint_hash(checkpoint), precision,
    )  # fmt: skip


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]):
    """Fills a model with the weights of a checkpoint; every name must be there, and none be left over.

    A parameter with two names (tied embeddings) is kept under its first one.

    Raises:
        UserError: the names are others: a version of this project wrote them whose models had other parameters.
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


def differences(old: dict, new: dict, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted key, old value, new value) of every difference between two trees of settings."""
    for key in old | new:
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key}", was, now
