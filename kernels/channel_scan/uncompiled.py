"""The scan as a break in the graph of torch.compile, which would unroll the loop: minutes. (It knows no C at all.)

To have the loop compiled: backend="loop". (The fused kernels are one operator of the graph.)
"""

import torch

from titans_pt.kernels.channel_scan.native import cpu_scan

call = torch.compiler.disable(cpu_scan)
