"""An implementation as a break in the graph of torch.compile, which would unroll its loop over blocks: minutes.

Who wants ``chunked`` compiled says backend="chunked". (The fused kernels are one operator of the graph.)
"""

import torch
from torch import Tensor

from titans_pt.kernels.memory.call import Backend, MemoryCall
from titans_pt.kernels.memory.state import MemoryState


@torch.compiler.disable
def run(backend: Backend, call: MemoryCall) -> tuple[Tensor, MemoryState]:
    return backend.run(call)
