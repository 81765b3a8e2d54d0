"""Checkpoints on disk: independent of the ranks that wrote them, and either complete or absent.

    checkpoints/step-00000020/
        model.safetensors       fp32 master weights by plain parameter name
        optimizer.safetensors   the optimiser's state by torch's names, fp32: exp_avg.NAME, exp_avg_sq.NAME for AdamW
        trainer.json            step, position in the data, counters, hashes, the settings
        manifest.json           size and SHA-256 of each file above; written last

With train.checkpoint_shards the first two files are replaced by shards, one per rank (shards.py), and the format is 2.

A checkpoint is built in a hidden sibling folder and renamed: a crash or a full disk leaves earlier checkpoints intact.
Nothing here knows about ranks or DeepSpeed. docs/checkpoints.md describes the layout.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from titans_pt.errors import UserError
from titans_pt.runs.shards import INDEX, ShardReader, Whole, join_shards
from titans_pt.tools.files import flush_to_disk, naming, unused, write_text
from titans_pt.tools.tensor_files import describe, open_tensors, save_tensors, sha256

FORMAT, SHARDED = 1, 2
"""Formats in manifest.json: whole tensors, or shards."""
_KNOWN_AS = "known as"
"""Entry of manifest.json: the hash that a merged checkpoint had before it was merged."""
WEIGHT = "weight"
"""The kind of a tensor that is a parameter."""
MODEL, OPTIMIZER, TRAINER, MANIFEST = "model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
"""Errors of a file that is gone, was replaced, or lies on a broken part of a disk."""
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The best validation of a run with train.patience."""

    step: int
    """Step of the best checkpoint, which evaluation uses."""
    loss: float
    since: int
    """Number of later validations, none of them better."""
    validated: int
    """Step of the last validation."""

    def numbers(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class TrainerState:
    """Content of trainer.json: all of a run's progress that is not a tensor."""

    step: int
    """Steps taken, skipped ones included."""
    samples: int
    """Training samples consumed: the position in the data."""
    adam_step: int
    """Updates applied, the optimiser's step count (for example, of Adam's bias correction)."""
    nonfinite: int
    """Number of steps skipped because the loss or a gradient was not finite."""
    nonfinite_in_a_row: int
    config: dict[str, Any]
    """The whole settings tree that wrote the checkpoint."""
    identity: dict[str, str]
    """Hash by name of everything that must be unchanged to continue: the data, a tokenizer (the task defines which)."""
    first_loss: float | None = None
    """Training loss of step 1, for the summary."""
    wandb_id: str | None = None
    origin: str | None = None
    """Source of the run's initial weights (train.init_from); None: random initialisation."""
    spikes: dict[str, float] = field(default_factory=dict)
    """Running statistics of the loss, see titans_pt.training.spikes.SpikeGuard."""
    best: dict[str, float] = field(default_factory=dict)
    """State of :class:`Best`; {} without train.patience."""
    topology: dict[str, Any] = field(default_factory=dict)
    """ranks, tensor, context, zero_stage, precision, device: for the reader; loading does not depend on these."""
    format: int = FORMAT


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders under ``folder``, oldest first, damaged ones included.

    Raises:
        UserError: ``folder`` is a file, or a link whose target is missing: its disk is not mounted, perhaps.
    """
    if not folder.is_dir():
        if folder.is_symlink():
            raise UserError(f"{folder}: a link to {os.readlink(folder)}, which does not exist here; bring it back, or "
                            "delete the link to start without checkpoints")  # fmt: skip
        if folder.exists():
            raise UserError(f"{folder}: is a file, and a run keeps its checkpoints in a folder of this name; move it "
                            "away")  # fmt: skip
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def steps_of(folder: Path) -> str:
    """The steps of the checkpoints under ``folder`` for a message: "10, 15, 20", or "none"."""
    return ", ".join(str(step_of(path)) for path in list_checkpoints(folder)) or "none"


def save(
    folder: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainerState, known_as: str = ""
) -> Path:
    """Writes checkpoint ``state.step`` under ``folder`` and returns its path.

    Tensors must be fp32, on the CPU and contiguous. An older checkpoint of the same step is replaced.

    Args:
        known_as: the :func:`checkpoint_hash` of an earlier form of this checkpoint, which saved states and results
            refer to.

    Raises:
        OSError: disk full, folder not writable; nothing of the new checkpoint remains, and others are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = checkpoint_path(folder, state.step)
    temporary = unfinished(folder, state.step)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        save_tensors(model, temporary / MODEL)
        save_tensors(optimizer, temporary / OPTIMIZER)
        files = {name: describe(temporary / name) for name in (MODEL, OPTIMIZER)}
        return _complete(temporary, final, files, state, known_as)
    finally:  # a complete one has been renamed
        shutil.rmtree(temporary, ignore_errors=True)


def unfinished(folder: Path, step: int) -> Path:
    """Hidden folder in which checkpoint ``step`` is built: by :func:`save`, or by all ranks, which write their shards
    (titans_pt.runs.shards.write_shard)."""
    return folder / f".{checkpoint_path(folder, step).name}.tmp"


def join(
    folder: Path, count: int, tensors: dict[str, Whole], state: TrainerState, stop: Callable[[], bool]
) -> Path | None:
    """Waits for the shards of ``count`` ranks and joins them into a checkpoint; returns its path. One rank calls it.

    Args:
        tensors: how each tensor is cut, by plain parameter name.
        stop: returns True when a rank has failed; then no checkpoint is written, and None is returned.

    Raises:
        OSError: as for :func:`save`.
    """
    temporary = unfinished(folder, state.step)
    try:
        files = join_shards(temporary, count, tensors, stop)
        return _complete(temporary, checkpoint_path(folder, state.step), files, state) if files else None
    finally:  # as in save
        shutil.rmtree(temporary, ignore_errors=True)


def _complete(temporary: Path, final: Path, files: dict[str, Any], state: TrainerState, known_as: str = "") -> Path:
    """Writes the rest of a checkpoint and renames it."""
    _write_json(temporary / TRAINER, asdict(state))
    files = files | {TRAINER: describe(temporary / TRAINER)}
    form = FORMAT if MODEL in files else SHARDED
    known = {_KNOWN_AS: known_as} if known_as else {}
    _write_json(temporary / MANIFEST, {"format": form, "step": state.step, **known, "files": files})
    for path in temporary.iterdir():
        flush_to_disk(path)
    flush_to_disk(temporary)
    # An older checkpoint of this step keeps its name until the new one is complete. It is deleted after the rename.
    hidden = final.with_name(f".{final.name}.old")
    replaced = os.path.lexists(final)
    if replaced:
        if os.path.lexists(hidden):
            _remove(hidden)
        os.replace(final, hidden)
    try:
        os.replace(temporary, final)
    except BaseException:
        if replaced:
            os.replace(hidden, final)
        raise
    flush_to_disk(final.parent)
    if replaced:
        with contextlib.suppress(OSError):  # clean() tries again
            _remove(hidden)
    return final


def verify(path: Path, content: bool = True) -> list[str]:
    """Problems of a checkpoint, one line each; empty if it is complete and no byte has changed.

    Args:
        content: False: compare only the sizes of the files, without reading them.

    Raises:
        OSError: it cannot be read now, for another reason than damage (_DAMAGE): its server does not answer, it belongs
            to another user, or too many files are open. An older checkpoint must not take its place.
    """
    if not path.exists():
        return ["it does not exist"]
    try:
        manifest = json.loads(_text(path / MANIFEST))
        if manifest["format"] not in (FORMAT, SHARDED):
            return [f"{MANIFEST}: format {manifest['format']}, this version reads {FORMAT} and {SHARDED}"]
        files = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
        needed = (MODEL, OPTIMIZER, TRAINER) if manifest["format"] == FORMAT else (INDEX, TRAINER)
        if absent := [name for name in needed if name not in files]:
            return [f"{MANIFEST}: does not list {', '.join(absent)}"]
    except FileNotFoundError:
        return [f"{MANIFEST}: missing; the checkpoint was never completed"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            raise
        return [f"{MANIFEST}: cannot be read ({error})"]
    problems = []
    for name, (written, digest) in files.items():
        try:
            if (size := (path / name).stat().st_size) != written:
                problems.append(f"{name}: {size} bytes, written with {written}")
            elif content and sha256(path / name) != digest:
                problems.append(f"{name}: content differs from what was written (SHA-256)")
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            problems.append(f"{name}: {error.strerror}")
    return problems


def newest_complete(folder: Path) -> Path | None:
    """The newest complete checkpoint under ``folder``; None if there are no checkpoints at all.

    Damaged checkpoints are named in a warning and stay in place.

    Raises:
        UserError: there are checkpoints, but none is complete; starting from scratch must be the user's decision.
        OSError: a checkpoint cannot be read now, as in :func:`verify`.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            problems = verify(path)
        except OSError as error:
            if os.path.lexists(path):
                raise
            problems = [str(error)]
        if not problems:
            return path
        if not os.path.lexists(path):  # its training has just deleted it, and has newer ones
            return newest_complete(folder)
        log.warning("checkpoint %s is damaged and skipped: %s", path, "; ".join(problems))
    if paths:
        raise UserError(
            f"{folder}: none of its {len(paths)} checkpoints is complete (the newest, {paths[-1].name}: "
            f"{verify(paths[-1])[0]}); restore one from a copy; to start from scratch, delete them or set "
            "another run.dir"
        )
    return None


def best(newest: Path) -> Path:
    """The checkpoint of the best validation up to ``newest``, with train.patience.

    Returns ``newest`` itself without train.patience, or if the best checkpoint is damaged or gone.
    """
    found = read_state(newest).best
    path = checkpoint_path(newest.parent, int(found["step"])) if found else newest
    if path != newest and (problems := verify(path)):
        log.warning("the best checkpoint, %s, is not complete: %s; %s takes its place", path, "; ".join(problems),
                    newest.name)  # fmt: skip
        return newest
    return path


def find(folder: Path, step: int | None = None, content: bool = True) -> Path:
    """The checkpoint of ``step``; None: the newest complete one, or the best one with train.patience.

    Args:
        content: False: compare only the sizes of the files of ``step``, as :func:`verify` does.

    Raises:
        UserError: there is no checkpoint, or the requested one is missing or damaged.
    """
    if step is None:
        if (path := newest_complete(folder)) is None:
            raise UserError(f"{folder}: holds no checkpoint yet; train first, or name the folder of another run")
        return best(path)
    path = checkpoint_path(folder, step)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; existing steps: {steps_of(folder)}")
    if problems := verify(path, content):
        raise UserError(f"{path}: damaged: {'; '.join(problems)}; choose another step")
    return path


def undisturbed(folder: Path, read: Callable[[], T]) -> T:
    """Returns ``read()``, which finds and reads a checkpoint of a run that may be training.

    A training deletes old checkpoints. If ``read`` failed while the list of checkpoints under ``folder`` changed, it is
    called again.
    """
    while True:
        before = list_checkpoints(folder)
        try:
            return read()
        except Exception:  # a missing file: FileNotFoundError, or safetensors' RuntimeError
            if list_checkpoints(folder) == before:
                raise


def read_state(path: Path) -> TrainerState:
    """
    Raises:
        UserError: a later version wrote the checkpoint, with progress that this version does not know.
    """
    tree = json.loads(_text(path / TRAINER))
    if "identity" not in tree:  # version 0.1.0 had no other task than language
        tree["identity"] = {"tokenizer": tree.pop("tokenizer_sha256"), "data": tree.pop("data_fingerprint")}
    for written in ("model_hash", "config_hash"):  # by versions up to 0.3.0, and read by none
        tree.pop(written, None)
    if unknown := sorted(tree.keys() - {field.name for field in fields(TrainerState)}):
        raise UserError(f"{path / TRAINER}: has {', '.join(unknown)}, which this version does not know; use the "
                        "version that wrote it, or a later one")  # fmt: skip
    return TrainerState(**tree)


def checkpoint_hash(path: Path) -> str:
    """SHA-256 (hex) of the manifest, and with it of everything in the checkpoint.

    A checkpoint merged from shards keeps the hash that it had as shards, since its tensors are the same.
    """
    return json.loads(_text(path / MANIFEST)).get(_KNOWN_AS) or sha256(path / MANIFEST)


class Tensors:
    """The tensors of a checkpoint, whole or in shards: ``with Tensors(path) as tensors: tensors.get("weight", name)``.

    A tensor is read on request. kind: "weight", or one of :meth:`moments`.
    """

    def __init__(self, path: Path):
        self._stack = ExitStack()
        self._shards = ShardReader(path) if (path / INDEX).is_file() else None
        self._path = path

    def __enter__(self):
        if self._shards:
            self._stack.enter_context(self._shards)
        else:
            self._model, self._optimizer = (
                self._stack.enter_context(open_tensors(self._path / name)) for name in (MODEL, OPTIMIZER)
            )
        return self

    def __exit__(self, *error):
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by plain name."""
        if self._shards:
            return {name: cut.shape for name, cut in self._shards.tensors.items()}
        return {name: tuple(self._model.get_slice(name).get_shape()) for name in self._model.keys()}  # noqa: SIM118

    def moments(self) -> dict[str, tuple[str, ...]]:
        """Kinds of the optimiser's state that the checkpoint has for each parameter; () for a frozen one."""
        found: dict[str, list[str]] = {name: [] for name in self.shapes()}
        for key in self._shards.keys() if self._shards else self._optimizer.keys():
            kind, _, name = key.partition(".")
            if kind != WEIGHT:
                found[name].append(kind)
        return {name: tuple(sorted(kinds)) for name, kinds in found.items()}

    def get(self, kind: str, name: str) -> Tensor:
        """The whole tensor, fp32."""
        if self._shards:
            return self._shards.whole(kind, name)
        return self._model.get_tensor(name) if kind == WEIGHT else self._optimizer.get_tensor(f"{kind}.{name}")

    def span(self, kind: str, name: str, cut: Whole, part: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flat ``part`` of a tensor that is cut as in ``cut``; fp32.

        If the checkpoint was written under the same split, only these elements are read.
        """
        if self._shards and self._shards.tensors[name] == cut:
            return self._shards.span(kind, name, part, start, stop)
        return cut.part(self.get(kind, name), part).flatten()[start:stop]


def read_weights(path: Path) -> dict[str, Tensor]:
    """All whole weights of a checkpoint by plain parameter name."""
    with Tensors(path) as tensors:
        return {name: tensors.get(WEIGHT, name) for name in tensors.shapes()}


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` has a checkpoint's name and manifest; a copy under another name does not count."""
    return bool(_NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()


def step_of(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    assert name, path
    return int(name[1])


def outdated(
    folder: Path, keep_last: int, keep_every: int | None = None, keep: Collection[Path] = (), newest: int | None = None
) -> list[Path]:
    """All checkpoints but the ``keep_last`` newest, those at multiples of ``keep_every`` steps, and ``keep``; oldest
    first. Incomplete ones do not count among the newest.

    Args:
        newest: step of the newest complete checkpoint. Later ones, which a restarted run found damaged, do not count
            among the newest and stay until the run replaces them. None: all are complete.
    """
    found = [path for path in list_checkpoints(folder) if newest is None or step_of(path) <= newest]
    whole = list(islice(filter(_is_whole, reversed(found)), keep_last))  # no more: a long run keeps hundreds
    old = found[: found.index(whole[-1])] if len(whole) == keep_last else []
    return [path for path in old if path not in keep and not (keep_every and step_of(path) % keep_every == 0)]


def _is_whole(path: Path) -> bool:
    try:
        return not verify(path, content=False)
    except OSError:  # it cannot be read now: it is kept, and does not count
        return False


def delete(old: Iterable[Path]) -> list[Path]:
    """Deletes checkpoints; returns those that are gone.

    If a checkpoint is a link, only the link is deleted: its target does not belong to the run. If a checkpoint cannot
    be deleted, a warning is logged, because the run matters more than the space.
    """
    gone = []
    for path in old:
        # Rename first: an interrupted deletion then leaves no damaged checkpoint.
        hidden = path.with_name(f".{path.name}.old")
        try:
            if os.path.lexists(hidden):
                _remove(hidden)
            os.replace(path, hidden)
            _remove(hidden)
            gone.append(path)
        except OSError as error:
            rest = f"; what is left of it is {hidden}" if os.path.lexists(hidden) else ""
            log.warning("old checkpoint %s could not be deleted: %s%s", path, error.strerror or error, rest)
    return gone


def _remove(path: Path):
    """Deletes a folder with its content, or a file, or a link without its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Moves the checkpoints after step ``after`` to ``folder``/set-aside and returns their new paths.

    Runs do not look there. The checkpoints stay until the user deletes them.
    """
    moved = []
    for path in list_checkpoints(folder):
        if step_of(path) <= after:
            continue
        place = unused(folder / "set-aside" / path.name)
        place.parent.mkdir(exist_ok=True)
        target = path.parent / path.readlink() if path.is_symlink() else None
        os.replace(path, place)
        if target:  # a relative link would point elsewhere from the new folder
            place.unlink()
            place.symlink_to(target.absolute())
        moved.append(place)
    return moved


def clean(folder: Path):
    """Removes the remains of unfinished writes and deletions after a crash.

    If the crash interrupted the replacement of a checkpoint, the old one gets its name back.
    """
    for path in folder.glob(".step-*.old"):
        own = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if not os.path.lexists(own) and unfinished(folder, step_of(own)).is_dir() and not verify(path):
            os.replace(path, own)
    for path in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            _remove(path)


def _text(path: Path) -> str:
    with naming(path):
        return path.read_text()


def _write_json(path: Path, value: Any):
    write_text(path, json.dumps(value, indent=1) + "\n")
