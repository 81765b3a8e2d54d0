"""The terminal or pipe that a program prints to, which may close while the program works."""

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None):
    """Prints a line, to stdout if ``stream`` is None; without a reader, this and all later output is dropped."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        drop(stream)


def drop(stream: TextIO):
    """Discards the buffer of ``stream`` and all that is written to it from now on."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
