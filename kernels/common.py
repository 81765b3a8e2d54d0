"""Helpers that the entries of all kernels share."""

import contextlib
import functools
import warnings

import torch
from torch import Tensor


def no_autocast(x: Tensor):
    """A context in which autocast leaves dtypes alone on ``x``'s device."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def warn_once(message: str):
    """Warns once of each message, whatever the warning filters."""
    if torch.compiler.is_compiling():  # a warning in a block's graph would cut it in two
        from titans_pt.kernels.compiling import warn
    else:
        warn = warned_of
    warn(message)


@functools.cache
def warned_of(message: str):
    warnings.warn(message, stacklevel=4)
