"""The dual form under torch.compile: one mini-batch is compiled, the loop over mini-batches is outside the graph.

torch.compile would unroll the loop, which takes minutes. Uncompiled, each mini-batch runs dozens of small operators.
With backend="dual" the loop is compiled.
"""

import functools
from collections.abc import Callable

import torch

from titans_pt.kernels.ttt_memory.dual import dual_ttt_memory, mini_batch


@functools.cache
def _compiled(step: Callable) -> Callable:
    return torch.compile(step, dynamic=False)


@torch.compiler.disable
def looped_ttt_memory(*arguments):
    """Run :func:`dual_ttt_memory` with compiled mini-batches."""
    return dual_ttt_memory(*arguments, step=_compiled(mini_batch))
