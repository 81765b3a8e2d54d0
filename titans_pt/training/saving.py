"""Writing checkpoints during a run, and deleting old ones."""

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from titans_pt.config import Config
from titans_pt.errors import Diverged
from titans_pt.runs import checkpoints
from titans_pt.runs.checkpoints import TrainerState
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.shards import Whole, write_shard
from titans_pt.tools.files import write_text
from titans_pt.tools.processes import note_progress
from titans_pt.training.background import BackgroundTask
from titans_pt.training.engine import Engine
from titans_pt.training.ranks import Ranks
from titans_pt.training.watchdog import Watchdog

log = logging.getLogger(__name__)


def spare_folder(spare: str | Path, run: Path) -> Path:
    """Folder under ``run.spare_dir`` for the last checkpoints of the run in ``run``; unique to this run."""
    path = run.resolve()
    return Path(spare) / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}" / "checkpoints"


class Saver:
    """Writes a run's checkpoints while training goes on, and deletes old ones.

    All ranks make the same calls. Rank 0 writes; with train.checkpoint_shards all ranks write. Nothing is saved or
    deleted while steps are non-finite: the weights may already be ruined, and the old checkpoints are healthy.

    Args:
        start: state of the checkpoint that the run continues from; None: a new run.
        state: returns the state for a checkpoint taken now, without tensors.
        written: called on rank 0 with the path of every checkpoint, from another thread.

    Attributes:
        step: step of the newest checkpoint; None: there is none yet.
        best: the best validation according to the newest checkpoint, with train.patience.
        postponed: whether a checkpoint is due since a non-finite step.
    """

    def __init__(
        self, folder: RunFolder, config: Config, engine: Engine, ranks: Ranks, watch: Watchdog,
        start: TrainerState | None, state: Callable[[], TrainerState], written: Callable[[Path], None],
    ):  # fmt: skip
        self.folder, self.config, self.engine, self.ranks, self.watch = folder, config, engine, ranks, watch
        self.step = start.step if start else None
        self.best = start.best if start else {}
        self.state, self.written, self.postponed = state, written, False
        self._writing, self._joining, self._stopped = BackgroundTask(), BackgroundTask(), threading.Event()
        self._error: OSError | None = None
        self._taken = False

    @property
    def failed(self) -> bool:
        """Whether this rank could not write to the run's folder; :meth:`wait` raises the reason on all."""
        return self._writing.failed or self._joining.failed or self._error is not None

    def report(self, error: OSError):
        """Notes that another file could not be written to the run's folder, so that all ranks end together."""
        self._error = self._error or error

    def save(self):
        """Takes a checkpoint of the engine, unless this step's was just taken or loaded. Training may continue at once.

        If a later validation (after a stop) changed the best checkpoint, the checkpoint is taken once more.

        After a non-finite step the checkpoint is postponed: the next call after a finite step takes it.

        Raises:
            OSError: the previous checkpoint could not be written, as in :meth:`wait`.
        """
        state = self.state()
        if self.step == state.step and state.best in ({}, self.best):
            return
        self.postponed = state.nonfinite_in_a_row > 0
        if self.postponed:
            return
        self.wait()
        if self.config.train.checkpoint_shards:
            self._start_shards(state)
        else:
            tensors = self._gather(state.step)
            if self.ranks.first:
                self._writing.start(partial(self._write, *tensors, state))
        self.step, self.best, self._taken = state.step, state.best, True

    def wait(self):
        """Returns when the last checkpoint is on the disk.

        Raises:
            OSError: on all ranks: the run's folder cannot be written to. A checkpoint is then written to run.spare_dir,
                if set.
        """
        self.watch.at("the end of writing a checkpoint")
        try:
            self.ranks.together(self._writing.wait)
            self.ranks.on_first(self._end_writing)
        except OSError:
            self._stopped.set()
            with contextlib.suppress(Exception):
                self._joining.wait()
            if self.config.run.spare_dir:
                self._rescue(spare_folder(self.config.run.spare_dir, self.folder.path))
            raise
        if self._taken:
            note_progress()

    def _end_writing(self):
        self._joining.wait()
        if self._error:
            raise self._error

    def _start_shards(self, state: TrainerState):
        """Makes every rank write its shard; rank 0 then joins them into a checkpoint, on another thread."""
        self.watch.at(f"the checkpoint of step {state.step}, copying")
        shard = partial(write_shard, checkpoints.unfinished(self.folder.checkpoints, state.step), self.ranks.rank)
        self._writing.start(partial(shard, *self.engine.masters.pieces()))
        if self.ranks.first:
            self._joining.start(partial(self._join, self.engine.masters.cuts(), state))

    def _join(self, cuts: dict[str, Whole], state: TrainerState):
        stopped, count = self._stopped.is_set, self.ranks.world_size
        if path := checkpoints.join(self.folder.checkpoints, count, cuts, state, stopped):
            self._written(path, state)

    def _rescue(self, folder: Path):
        """Writes a last checkpoint to ``folder``, except after a non-finite step. Errors are logged."""
        state = self.state()
        if state.nonfinite_in_a_row:
            return
        tensors = self._gather(state.step)
        try:
            path = self.ranks.on_first(lambda: checkpoints.save(folder, *tensors, state))
        except OSError as error:
            if self.ranks.first:
                log.warning("run.spare_dir: it cannot be written to, either: %s", error)
            return
        if self.ranks.first:
            log.warning("run.spare_dir: %s is the last checkpoint; once there is space, move it to %s and run the "
                        "same command to continue from step %d", path, self.folder.checkpoints, state.step)  # fmt: skip

    def _gather(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gathers (model, optimiser) on rank 0 as checkpoints.save takes them; other ranks get empty dictionaries."""
        self.watch.at(f"the checkpoint of step {step}, gathering")
        model: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        for kind, name, tensor in self.engine.masters.gather():
            if self.ranks.first:
                tensors, key = (model, name) if kind == checkpoints.WEIGHT else (optimizer, f"{kind}.{name}")
                tensors[key] = tensor.detach().to("cpu", copy=True)
            del tensor  # before the next one needs its memory
        return model, optimizer

    def give_up(self):
        """Ends the run for good after non-finite steps.

        No launcher should restart the run by itself, because the same settings would fail again. The weights before
        these steps may already be ruined, and every checkpoint written now would replace a healthy one.

        Raises:
            Diverged: always.
        """
        self.wait()
        state, train = self.state(), self.config.train
        step, in_a_row = state.step, state.nonfinite_in_a_row
        end = step - in_a_row
        early = in_a_row < train.max_nonfinite and end > 0
        there = self.ranks.on_first(lambda: checkpoints.list_checkpoints(self.folder.checkpoints))
        saved = [checkpoints.step_of(path) for path in there]
        again = (f"continue from a healthy checkpoint: train.resume={saved[-1]} or an earlier one"
                 if saved else "run the command again, which then starts from scratch")  # fmt: skip
        why = (
            f"train.max_nonfinite: the last {in_a_row} steps (to {step}) had a loss or gradient that is not finite; "
            f"nothing was saved since, steps with a checkpoint: {', '.join(map(str, saved)) or 'none'}. "
            + (f"train.stop_at={end} ends with a checkpoint before them. Otherwise lower " if early else "Lower ")
            + f"train.lr={train.lr:g}, "
            + ("" if train.precision == "fp32" else "set train.precision=fp32, ")
            + f"or raise train.warmup_steps={train.warmup_steps}, and {again}; "
            f"the samples of these steps are in {self.folder.metrics}"
        )
        self.ranks.on_first(lambda: write_text(self.folder.diverged, why + "\n"))
        raise Diverged(why)

    def close(self):
        """Waits for the last checkpoint without raising its errors."""
        self._stopped.set()
        self._writing.close()
        self._joining.close()

    def _write(self, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainerState):
        self._written(checkpoints.save(self.folder.checkpoints, model, optimizer, state), state)

    def _written(self, path: Path, state: TrainerState):
        train = self.config.train
        best = [checkpoints.checkpoint_path(self.folder.checkpoints, int(state.best["step"]))] if state.best else []
        kept = [path, *best]
        folder = self.folder.checkpoints
        checkpoints.delete(checkpoints.outdated(folder, train.keep_last, train.keep_every, kept, newest=state.step))
        log.info("step %d: checkpoint %s", state.step, path)
        self.written(path)
