"""The dual forms as breaks in the graph of torch.compile, which would unroll their loops over blocks: minutes.

Who wants ``chunked`` compiled says backend="chunked". (The fused kernels are one operator of the graph.)
"""

import torch

from titans_pt.kernels.memory.channelwise import channelwise_memory
from titans_pt.kernels.memory.chunked import chunked_memory
from titans_pt.kernels.memory.stale import stale_memory

chunked = torch.compiler.disable(chunked_memory)
channelwise = torch.compiler.disable(channelwise_memory)
stale = torch.compiler.disable(stale_memory)
