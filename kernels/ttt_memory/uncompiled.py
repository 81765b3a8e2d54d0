"""The dual form behind a graph break: torch.compile would unroll its loop over mini-batches, which takes minutes.

With backend="dual" it is compiled.
"""

import torch

from titans_pt.kernels.ttt_memory.dual import dual_ttt_memory

call = torch.compiler.disable(dual_ttt_memory)
