"""The metrics for TensorBoard: ``tensorboard --logdir runs`` compares all runs in a folder."""

import contextlib
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
        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]):
        """Writes the values of a step.

        Raises:
            OSError: the disk is full, for example; nothing more is written then.
        """
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def close(self):
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk was reported before
                self._writer.close()
