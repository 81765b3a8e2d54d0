"""Warnings that are given once, in a compiled program or out of it."""

import functools
import warnings


@functools.cache
def warned_of(message: str):
    warnings.warn(message, stacklevel=4)
