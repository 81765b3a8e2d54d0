"""The dual form as a break in the graph of torch.compile, which would unroll its loop over mini-batches: minutes.

To have it compiled: backend="dual".
"""

import torch

from titans_pt.kernels.ttt_memory.dual import dual_ttt_memory

call = torch.compiler.disable(dual_ttt_memory)
