"""Helpers that the entries of all kernels share."""

import contextlib
import functools
import warnings

import torch
from torch import Tensor


def no_autocast(x: Tensor):
    """A context in which autocast leaves dtypes alone on ``x``'s device."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@functools.cache
def warn_once(message: str):
    """Warns once of each message, whatever the warning filters."""
    warnings.warn(message, stacklevel=3)
