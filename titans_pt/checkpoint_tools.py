"""``titans checkpoint``: look at a run's checkpoints, check every byte of them, delete old ones."""

import json
from pathlib import Path

from titans_pt import checkpoints
from titans_pt.errors import UserError
from titans_pt.run_folder import RunFolder


def list_run(run: str):
    """Prints one line per checkpoint, oldest first: step, samples read, size, the ranks that wrote it."""
    for path in _found(run):
        try:
            state = checkpoints.read_state(path)
            files = json.loads((path / checkpoints.MANIFEST).read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path}: incomplete or damaged ({error})")
            continue
        size = sum(file["bytes"] for file in files.values()) / 2**20
        grid = ", ".join(f"{key} {value}" for key, value in state.topology.items())
        print(f"{path}: step {state.step}, {state.samples} samples, {size:.1f} MiB, format {state.format}, {grid}")


def verify_run(run: str):
    """Reads every byte of every checkpoint and prints one line each.

    Raises:
        UserError: one is damaged.
    """
    paths = _found(run)
    damaged = 0
    for path in paths:
        problems = checkpoints.verify(path)
        damaged += bool(problems)
        print(f"{path}: {'; '.join(problems) or 'complete'}", flush=True)
    if damaged:
        raise UserError(
            f"{run}: {damaged} of {len(paths)} checkpoints are damaged; training skips them and continues from "
            "the newest complete one: restore them from a copy, or delete them"
        )


def prune_run(run: str, keep_last: int, keep_every: int | None):
    """Deletes what train.keep_last and train.keep_every would and prints it; refused while the run is training."""
    _found(run)
    folder = RunFolder(run)
    with folder.lock():
        for path in checkpoints.prune(folder.checkpoints, keep_last, keep_every):
            print(f"{path}: deleted")


def _found(run: str) -> list[Path]:
    """
    Raises:
        UserError: there is no checkpoint.
    """
    folder = RunFolder(run)
    if not (found := checkpoints.list_checkpoints(folder.checkpoints)):
        raise UserError(f"{folder.checkpoints}: holds no checkpoint; name the run.dir of a training run")
    return found
