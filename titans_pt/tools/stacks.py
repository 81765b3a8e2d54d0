"""Stacks of a process on request: SIGUSR2."""

import contextlib
import faulthandler
import signal
import sys
from typing import IO


def stacks_to(file: IO[str] | None = None):
    """From now on, SIGUSR2 writes the stacks of all threads to ``file``, on standard error by default, and the process
    goes on. Without this, the signal ends it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # standard error has no file below it
        faulthandler.register(signal.SIGUSR2, file or sys.__stderr__, all_threads=True)
