"""Ctrl-C while modules are imported, which takes seconds: the process ends at once and silently."""

import signal
from types import FrameType

_IMPORTS = "<frozen importlib._bootstrap>"
"""File name of the frames of an import."""


def quiet_imports():
    """Makes Ctrl-C during an import end the process by SIGINT. At any other time it raises KeyboardInterrupt, as usual.

    Within an import the exception would end in a traceback; some libraries turn it into another error, or ignore it. A
    process that ignores SIGINT (under nohup, or in a script's background) still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(_number: int, frame: FrameType | None):
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        frame = frame.f_back
    raise KeyboardInterrupt
