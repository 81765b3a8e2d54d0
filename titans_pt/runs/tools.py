"""``titans checkpoint``: list, verify, prune, merge and average a run's checkpoints."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from titans_pt.config.files import load_stored, validated
from titans_pt.errors import UserError
from titans_pt.runs import checkpoints
from titans_pt.runs.checkpoints import TrainerState
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.written import check_new, new_run
from titans_pt.tasks import task_of


def list_run(run: str):
    """Prints one line per checkpoint, oldest first: step, samples read, size, ranks that wrote it."""
    for path in _found(run):
        try:
            state = checkpoints.read_state(path)
            manifest = json.loads((path / checkpoints.MANIFEST).read_text())
            files, form = manifest["files"], manifest["format"]
            size = sum(file["bytes"] for file in files.values()) / 2**20
            grid = ", ".join(f"{key} {value}" for key, value in state.topology.items())
        except UserError as error:  # a later version wrote it
            print(error)
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if os.path.lexists(path):  # else the run has just deleted it
                print(f"{path}: incomplete or damaged ({error})")
            continue
        print(f"{path}: step {state.step}, {state.samples} samples, {size:.1f} MiB, format {form}, {grid}")


def verify_run(run: str):
    """Reads every byte of every checkpoint and prints one line each.

    Raises:
        UserError: a checkpoint is damaged, or cannot be read.
    """
    paths = _found(run)
    damaged = 0
    for path in paths:
        try:
            problems = checkpoints.verify(path)
        except OSError as error:
            problems = [str(error)]
        if not os.path.lexists(path):
            print(f"{path}: deleted by its training")
            continue
        damaged += bool(problems)
        print(f"{path}: {'; '.join(problems) or 'complete'}", flush=True)
    if damaged:
        raise UserError(
            f"{run}: {damaged} of {len(paths)} checkpoints are damaged; training skips them and continues from "
            "the newest complete one: restore them from a copy, or delete them"
        )


def prune_run(run: str, keep_last: int, keep_every: int | None):
    """Deletes the checkpoints that train.keep_last and train.keep_every would delete, and prints their paths.

    It never deletes the newest complete checkpoint nor, with train.patience, the best.

    Raises:
        UserError: no checkpoint is complete, one could not be deleted, or the run is training.
    """
    with _locked(run) as folder:
        newest = checkpoints.newest_complete(folder.checkpoints)
        keep = {newest, checkpoints.best(newest)} if newest else set()
        last = checkpoints.step_of(newest) if newest else None
        old = checkpoints.outdated(folder.checkpoints, keep_last, keep_every, keep, last)
        links = {path: path.readlink() for path in old if path.is_symlink()}
        gone = checkpoints.delete(old)
        for path in gone:
            print(f"{path}: deleted" + (f" (a link; {links[path]} stays)" if path in links else ""))
        if rest := len(old) - len(gone):
            raise UserError(f"{run}: {rest} of {len(old)} old checkpoints could not be deleted, for the reasons above; "
                            "change the permissions of their folders, or delete them yourself")  # fmt: skip


def merge_run(run: str, step: int | None):
    """Turns a checkpoint of shards into one of whole tensors: that of ``step``, or the newest complete one (with
    train.patience the best).

    Raises:
        UserError: there is no checkpoint, it is damaged, or the run is training.
    """
    with _locked(run) as folder:
        path = checkpoints.find(folder.checkpoints, step)
        if (path / checkpoints.MODEL).is_file():
            print(f"{path}: holds whole tensors already")
            return
        with checkpoints.Tensors(path) as tensors:
            weights = {name: tensors.get(checkpoints.WEIGHT, name) for name in tensors.shapes()}
            moments = {
                f"{kind}.{name}": tensors.get(kind, name) for name, kinds in tensors.moments().items() for kind in kinds
            }
        state, before = checkpoints.read_state(path), checkpoints.checkpoint_hash(path)
        checkpoints.save(folder.checkpoints, weights, moments, state, known_as=before)
        print(f"{path}: whole tensors now")


def average_run(run: str, out: Path, last: int, steps: Sequence[int] = ()):
    """Writes a run with one checkpoint, whose weights are the mean of several checkpoints of ``run``.

    Sources: stochastic weight averaging (Izmailov et al., arXiv 1803.05407); the latest checkpoints of a pretraining
    (Kaddour, arXiv 2209.14981).

    Args:
        out: the run folder to write.
        last: number of checkpoints, the newest complete ones; without ``steps``.
        steps: steps of the checkpoints.

    Raises:
        UserError: fewer than two checkpoints, a damaged one, or ``out`` holds a run already.
    """
    folder, target = RunFolder(run), RunFolder(out)
    check_new(target)

    def mean() -> tuple[list[int], TrainerState, dict[str, Tensor]]:
        complete = [checkpoints.step_of(path) for path in _found(run) if not checkpoints.verify(path, content=False)]
        chosen = sorted(set(steps)) or complete[-last:]
        paths = [checkpoints.find(folder.checkpoints, step) for step in chosen]
        if len(paths) < 2:
            raise UserError(f"{run}: an average needs two checkpoints, found {len(paths)} (steps "
                            f"{checkpoints.steps_of(folder.checkpoints)}); a run keeps more with train.keep_last or "
                            "train.keep_every")  # fmt: skip
        with ExitStack() as stack:
            every = [stack.enter_context(checkpoints.Tensors(path)) for path in paths]
            weights = {
                name: (sum(each.get(checkpoints.WEIGHT, name).double() for each in every) / len(every)).float()
                for name in every[0].shapes()
            }
        return chosen, checkpoints.read_state(paths[-1]), weights

    averaged, state, weights = checkpoints.undisturbed(folder.checkpoints, mean)
    folder.check_settings()
    config = validated(load_stored(folder.config).model_dump(mode="json"), [f"run.dir={out}"])
    task = task_of(config)
    task.restore(folder, state.identity)
    told = ", ".join(map(str, averaged))
    origin = f"mean of {run} at steps {told}"
    state = replace(state, samples=0, adam_step=0, best={}, wandb_id=None, origin=origin)
    with new_run(target):
        checkpoints.save(target.checkpoints, weights, {}, state)
        task.keep(target)
        target.write_settings(config)
    print(f"{out}: the mean of {len(averaged)} checkpoints, of steps {told}")


@contextmanager
def _locked(run: str) -> Iterator[RunFolder]:
    """Locks the run's folder, and removes what a killed process left among its checkpoints.

    Raises:
        UserError: there is no checkpoint, or the run is training.
    """
    folder = RunFolder(run)
    if not folder.checkpoints.is_dir():
        _found(run)  # raises: the lock would create the folder
    with folder.lock():
        checkpoints.clean(folder.checkpoints)
        _found(run)
        yield folder


def _found(run: str) -> list[Path]:
    """The run's checkpoints, oldest first.

    Raises:
        UserError: there is no checkpoint.
    """
    folder = RunFolder(run)
    if not (found := checkpoints.list_checkpoints(folder.checkpoints)):
        raise UserError(f"{folder.checkpoints}: holds no checkpoint; name the run.dir of a training run")
    return found
