"""When a run writes checkpoints and deletes old ones."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from titans_pt import checkpoints
from titans_pt.checkpoints import TrainerState
from titans_pt.config import TrainConfig
from titans_pt.errors import UserError
from titans_pt.run_folder import RunFolder
from titans_pt.training.background import BackgroundTask
from titans_pt.training.engine import Engine
from titans_pt.training.ranks import Ranks
from titans_pt.training.watchdog import Watchdog

log = logging.getLogger(__name__)


class Saver:
    """Writes a run's checkpoints while training goes on, and deletes old ones.

    All ranks make the same calls; rank 0 alone writes. Nothing is saved or deleted while steps are not finite: the
    weights may be ruined already, and what would be deleted is healthy.

    Args:
        settings: of training.
        step: of the checkpoint that the run continues from; None: it starts.
        written: called on rank 0 with the path of every checkpoint, from another thread.

    Attributes:
        step: of the newest checkpoint; None: there is none yet.
        postponed: one is due since a step that was not finite.
    """

    def __init__(
        self, folder: RunFolder, settings: TrainConfig, engine: Engine, ranks: Ranks, watch: Watchdog,
        step: int | None, written: Callable[[Path], None],
    ):  # fmt: skip
        self.folder, self.settings, self.engine, self.ranks, self.watch = folder, settings, engine, ranks, watch
        self.step, self.written, self.postponed = step, written, False
        self._writing = BackgroundTask()

    @property
    def failed(self) -> bool:
        """Whether writing has failed on this rank; :meth:`wait` raises the reason on all."""
        return self._writing.failed

    def save(self, state: TrainerState):
        """Takes a checkpoint of the engine as it is, unless it was just taken or loaded. Training may go on at once.

        After a step that was not finite it is postponed: the next call after a finite one takes it.
        """
        if self.step == state.step:
            return
        self.postponed = state.nonfinite_in_a_row > 0
        if self.postponed:
            return
        self.wait(state.step)
        self.watch.at(f"the checkpoint of step {state.step}, gathering")
        model, optimizer = {}, {}

        def take(kind: str, name: str, tensor: Tensor):
            if self.ranks.first:
                tensors, key = (model, name) if kind == "weight" else (optimizer, f"{kind}.{name}")
                tensors[key] = tensor.detach().to("cpu", copy=True)

        self.engine.gather(take)
        if self.ranks.first:
            self._writing.start(partial(self._write, model, optimizer, state))
        self.step = state.step

    def wait(self, step: int):
        """Returns, at ``step``, when the last checkpoint is on the disk; if it failed, fails on all ranks."""
        self.watch.at(f"step {step}, the end of writing a checkpoint")
        self.ranks.on_first(self._writing.wait)

    def give_up(self, step: int, in_a_row: int):
        """Ends the run for good at ``step``, the last of so many in a row that were not finite.

        The same settings would lead here again, so no launcher should start it again by itself: the weights before
        these steps may already be ruined, and every checkpoint written now would push out a healthy one.

        Raises:
            UserError: always.
        """
        self.wait(step)
        train, end = self.settings, step - in_a_row
        early = in_a_row < train.max_nonfinite and end > 0
        steps = self.ranks.on_first(lambda: checkpoints.steps_of(self.folder.checkpoints))
        raise UserError(
            f"train.max_nonfinite: the last {in_a_row} steps (to {step}) had a loss or gradient that is not finite; "
            f"nothing was saved since, steps with a checkpoint: {steps}. "
            + (f"train.stop_at={end} ends with a checkpoint before them. Otherwise lower " if early else "Lower ")
            + f"train.lr={train.lr:g}, raise train.warmup_steps={train.warmup_steps}, or set train.precision=fp32, and "
            "continue from a healthy checkpoint: train.resume=STEP; the samples of these steps are in "
            f"{self.folder.metrics}"
        )

    def close(self):
        """Waits for the last checkpoint without raising what went wrong with it."""
        self._writing.close()

    def _write(self, model: dict[str, Tensor], optimizer: dict[str, Tensor], state: TrainerState):
        path = checkpoints.save(self.folder.checkpoints, model, optimizer, state)
        checkpoints.prune(self.folder.checkpoints, self.settings.keep_last, self.settings.keep_every, keep=path)
        log.info("step %d: checkpoint %s", state.step, path)
        self.written(path)
