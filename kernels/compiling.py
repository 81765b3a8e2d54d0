"""Warnings while torch.compile compiles, given at compile time and left out of the graph.

Import this only while compiling: torch.compiler brings the compiler, whose import takes more than a second.
"""

import torch

from titans_pt.kernels.warned import warned_of


@torch.compiler.assume_constant_result
def warn(message: str):
    warned_of(message)
