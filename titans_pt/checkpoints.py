"""Checkpoints on disk: independent of the ranks that wrote them, and either complete or absent.

    checkpoints/step-00000020/
        model.safetensors       fp32 master weights by plain parameter name
        optimizer.safetensors   exp_avg.NAME and exp_avg_sq.NAME, fp32
        trainer.json            step, position in the data, counters, hashes, the settings
        manifest.json           size and SHA-256 of each file above; written last

A checkpoint is built in a hidden sibling folder and renamed, so a crash or a full disk leaves the earlier ones alone.
Nothing here knows about ranks or DeepSpeed. docs/checkpoints.md describes the layout.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from titans_pt.errors import UserError
from titans_pt.tools.files import flush_to_disk

FORMAT = 1
MODEL, OPTIMIZER, TRAINER, MANIFEST = "model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """What trainer.json holds: all of a run's progress that is not a tensor."""

    step: int
    """Steps taken, skipped ones included."""
    samples: int
    """Training samples consumed: the position in the data."""
    adam_step: int
    """Updates applied: Adam's bias-correction count."""
    nonfinite: int
    """All steps that were skipped because the loss or a gradient was not finite."""
    nonfinite_in_a_row: int
    model_hash: str
    config_hash: str
    config: dict[str, Any]
    """The whole settings tree that wrote the checkpoint."""
    identity: dict[str, str]
    """Hashes by name of what must be unchanged to continue from it: the data, a tokenizer (the task says which)."""
    first_loss: float | None = None
    """Training loss of step 1, for the summary."""
    wandb_id: str | None = None
    origin: str | None = None
    """What the run's first weights were taken from (train.init_from); None: they were drawn."""
    spikes: dict[str, float] = field(default_factory=dict)
    """Running figures of the loss, see titans_pt.training.spikes.SpikeGuard."""
    topology: dict[str, Any] = field(default_factory=dict)
    """ranks, tensor, zero_stage, precision: for the reader; loading does not depend on it."""
    format: int = FORMAT


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders under ``folder``, oldest first, damaged ones included."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def steps_of(folder: Path) -> str:
    """The steps of the checkpoints under ``folder`` for a message: "10, 15, 20", or "none"."""
    return ", ".join(str(step_of(path)) for path in list_checkpoints(folder)) or "none"


def save(folder: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainerState) -> Path:
    """Writes checkpoint ``state.step`` under ``folder`` and returns its path.

    Tensors must be fp32, on the CPU and contiguous. An older checkpoint of the same step is replaced.

    Raises:
        OSError: disk full, folder not writable; nothing of the new checkpoint remains, the others are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = checkpoint_path(folder, state.step)
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        _save_tensors(model, temporary / MODEL)
        _save_tensors(optimizer, temporary / OPTIMIZER)
        _write_json(temporary / TRAINER, asdict(state))
        files = {name: _describe(temporary / name) for name in (MODEL, OPTIMIZER, TRAINER)}
        _write_json(temporary / MANIFEST, {"format": FORMAT, "step": state.step, "files": files})
        for path in temporary.iterdir():
            flush_to_disk(path)
        flush_to_disk(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        flush_to_disk(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def verify(path: Path) -> list[str]:
    """Problems of a checkpoint, each one line; empty when it is complete and no byte has changed."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return [f"{MANIFEST}: format {manifest['format']}, this version reads {FORMAT}"]
        files = manifest["files"].items()
    except FileNotFoundError:
        return [f"{MANIFEST}: missing, so it was never completed"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST}: cannot be read ({error})"]
    problems = []
    for name, expected in files:
        try:
            if (size := (path / name).stat().st_size) != expected["bytes"]:
                problems.append(f"{name}: {size} bytes, written with {expected['bytes']}")
            elif _sha256(path / name) != expected["sha256"]:
                problems.append(f"{name}: content differs from what was written (SHA-256)")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint under ``folder`` that is complete; None when there is none at all.

    Damaged ones are named in a warning and left where they are.

    Raises:
        UserError: there are checkpoints, but none is complete; starting from scratch must be the user's decision.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        problems = verify(path)
        if not problems:
            return path
        log.warning("checkpoint %s is damaged and skipped: %s", path, "; ".join(problems))
    if paths:
        raise UserError(
            f"{folder}: none of its {len(paths)} checkpoints is complete (the newest, {paths[-1].name}: "
            f"{verify(paths[-1])[0]}); restore one from a copy; to start from scratch, delete them or set "
            "another run.dir"
        )
    return None


def find(folder: Path, step: int | None = None) -> Path:
    """The checkpoint of ``step``, or the newest complete one.

    Raises:
        UserError: there is none, or the one asked for is missing or damaged.
    """
    if step is None:
        if (path := newest_complete(folder)) is None:
            raise UserError(f"{folder}: holds no checkpoint yet; train first, or name the folder of another run")
        return path
    path = checkpoint_path(folder, step)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; existing steps: {steps_of(folder)}")
    if problems := verify(path):
        raise UserError(f"{path}: damaged: {'; '.join(problems)}; choose another step")
    return path


def read_state(path: Path) -> TrainerState:
    tree = json.loads((path / TRAINER).read_text())
    if "identity" not in tree:  # version 0.1.0 had no other task than language
        tree["identity"] = {"tokenizer": tree.pop("tokenizer_sha256"), "data": tree.pop("data_fingerprint")}
    return TrainerState(**tree)


def checkpoint_hash(path: Path) -> str:
    """SHA-256 (hex) of the manifest, hence of everything in the checkpoint."""
    return _sha256(path / MANIFEST)


class TensorFile:
    """Tensors of one file, read one at a time: ``with TensorFile(path) as get: get(name)``."""

    def __init__(self, path: Path):
        self._file = safe_open(path, framework="pt", device="cpu")

    def __enter__(self):
        return self._file.__enter__().get_tensor

    def __exit__(self, *error):
        return self._file.__exit__(*error)


def read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def prune(folder: Path, keep_last: int, keep_every: int | None = None, keep: Path | None = None) -> list[Path]:
    """Deletes all but the ``keep_last`` newest checkpoints, those of steps that divide by ``keep_every``, and ``keep``.

    One that cannot be deleted is a warning: the run is worth more than the space. Returns the deleted ones.
    """
    gone = []
    for path in list_checkpoints(folder)[:-keep_last]:
        if path == keep or (keep_every and step_of(path) % keep_every == 0):
            continue
        try:
            # Renamed first, so that an interrupted deletion does not leave a damaged checkpoint.
            hidden = path.with_name(f".{path.name}.old")
            shutil.rmtree(hidden, ignore_errors=True)
            os.replace(path, hidden)
            gone.append(path)
            shutil.rmtree(hidden)
        except OSError as error:
            log.warning("old checkpoint %s could not be deleted: %s", path, error.strerror)
    return gone


def set_aside(folder: Path, after: int) -> list[Path]:
    """Moves the checkpoints after step ``after`` to ``folder``/set-aside, where nothing finds them, and returns where
    they are now. They stay until the user deletes them."""
    moved = []
    for path in list_checkpoints(folder):
        if step_of(path) <= after:
            continue
        place = folder / "set-aside" / path.name
        place.parent.mkdir(exist_ok=True)
        for n in itertools.count(2):
            if not place.exists():
                break
            place = place.with_name(f"{path.name}-{n}")
        os.replace(path, place)
        moved.append(place)
    return moved


def clean(folder: Path):
    """Removes what unfinished writes and deletions left after a crash."""
    for path in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)


def _save_tensors(tensors: dict[str, Tensor], path: Path):
    """Writes fp32 tensors as safetensors (its format: length of the header, header as JSON, the numbers).

    The library's save_file holds Python's lock until the disk is done, so training would pause; these writes do not.
    """
    header, offset = {}, 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in header:
                file.write(tensors[name].numpy().data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # a failed write does not say where


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any):
    path.write_text(json.dumps(value, indent=1) + "\n")
