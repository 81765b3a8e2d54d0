"""The metrics for TensorBoard: ``tensorboard --logdir runs`` compares all runs in a folder."""

import contextlib
import threading
from typing import Any

from titans_pt.errors import UserError
from titans_pt.runs.folder import RunFolder


class TensorBoardLog:
    """Writes metrics to ``tensorboard/`` of the run folder; nothing if ``wanted`` is False.

    Args:
        step: step of the checkpoint that is resumed, or 0; records of later steps by earlier processes are hidden.

    Raises:
        UserError: the package is not installed.
    """

    def __init__(self, wanted: bool, folder: RunFolder, step: int):
        self._writer = None
        if not wanted:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "run.tensorboard: the package tensorboard is missing; pip install 'titans-pt[tensorboard]', or set "
                "run.tensorboard=false"
            ) from None
        self._folder, self._printed = folder.tensorboard, threading.excepthook
        threading.excepthook = self._hook
        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    def _hook(self, told: Any):
        """Prints the error of a thread, except an OSError of the writer's, which the next write raises."""
        if not (issubclass(told.exc_type, OSError) and type(told.thread).__module__.startswith("tensorboard.")):
            self._printed(told)

    def write(self, step: int, values: dict[str, Any]):
        """Writes the values of a step.

        Raises:
            OSError: the disk is full, for example; nothing more is written then. The error names the folder.
        """
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            self._writer = None  # and the hook stays: the thread may yet print
            raise OSError(error.errno, error.strerror, str(self._folder)) from None  # the writer names files in bytes

    def close(self):
        if self._writer is not None:
            threading.excepthook = self._printed
            with contextlib.suppress(OSError):  # a full disk was reported before
                self._writer.close()
