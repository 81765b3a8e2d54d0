"""Help for code under torch.compile: steps of loops that stay outside the graph, and warnings.

Import this only when compiling: torch.compiler brings the compiler, whose import takes more than a second.
"""

import functools
from collections.abc import Callable

import torch

from titans_pt.kernels.warned import warned_of


@torch.compiler.assume_constant_result
def warn(message: str):
    """Warn at compile time, and leave the warning out of the graph."""
    warned_of(message)


@functools.cache
def compiled(step: Callable) -> Callable:
    """A loop's step as one program for all its calls. Uncompiled, it would launch dozens of small kernels.

    CUDA graphs are off: they keep the results of the last call, and training needs those of all.
    """
    return torch.compile(step, dynamic=False)
