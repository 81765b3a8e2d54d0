"""Stacks of a process on request: SIGUSR2."""

import contextlib
import faulthandler
import signal
import sys
from typing import IO


def stacks_to(file: IO[str] | None = None):
    """Makes SIGUSR2 write the stacks of all threads to ``file``, by default standard error.

    The process then continues; without this, the signal would end it.
    """
    with contextlib.suppress(AttributeError, ValueError, OSError):  # standard error may have no file descriptor
        if to := file or sys.__stderr__:
            faulthandler.register(signal.SIGUSR2, to, all_threads=True)
