"""The dual form as a break in the graph of torch.compile, which would unroll its loop over blocks: minutes.

Who wants it compiled says backend="chunked". (The fused kernels are one operator of the graph.)
"""

import torch

from titans_pt.kernels.memory.chunked import chunked_memory

call = torch.compiler.disable(chunked_memory)
