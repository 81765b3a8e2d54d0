"""Output to a terminal or pipe that may close while the program runs."""

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None):
    """Prints a line, to stdout if ``stream`` is None. If the reader has closed, drops this and later output."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        drop(stream)


def drop(stream: TextIO):
    """Discards the buffer of ``stream`` and all later output to it."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
