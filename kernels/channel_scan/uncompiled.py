"""The scan behind a graph break: torch.compile would unroll the loop, which takes minutes, and cannot trace C.

With backend="loop" the loop is compiled. The fused kernels are a single operator of the graph.
"""

import torch

from titans_pt.kernels.channel_scan.native import cpu_scan

call = torch.compiler.disable(cpu_scan)
