"""The dual form under torch.compile: one mini-batch is compiled, the loop over mini-batches is outside the graph.

torch.compile would unroll the loop, which takes minutes. With backend="dual" the loop is compiled.
"""

import torch

from titans_pt.kernels import compiling
from titans_pt.kernels.ttt_memory.dual import dual_ttt_memory, mini_batch


@torch.compiler.disable
def looped_ttt_memory(*arguments):
    """Run :func:`dual_ttt_memory` with compiled mini-batches."""
    return dual_ttt_memory(*arguments, step=compiling.compiled(mini_batch))
