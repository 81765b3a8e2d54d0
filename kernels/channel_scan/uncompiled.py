"""The loop as a break in the graph of torch.compile, which would unroll it: minutes.

To have it compiled: backend="loop". (The fused kernels are one operator of the graph.)
"""

import torch

from titans_pt.kernels.channel_scan.loop import loop_scan

call = torch.compiler.disable(loop_scan)
