"""Helpers that the entries of all kernels share."""

import contextlib
import functools
import warnings

import torch
from torch import Tensor


def no_autocast(x: Tensor):
    """A context in which autocast leaves dtypes alone on ``x``'s device."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@torch.compiler.assume_constant_result  # done while a block is compiled: a warning in its graph would cut it in two
def warn_once(message: str):
    """Warns once of each message, whatever the warning filters."""
    warned_of(message)


@functools.cache
def warned_of(message: str):
    warnings.warn(message, stacklevel=4)
