"""Run a call outside the graph of torch.compile, which would spend minutes on unrolling the loop over blocks.

To compile ``chunked``, pass backend="chunked". (The fused kernels are one operator of the graph.)
"""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


@torch.compiler.disable
def run(function: Callable[..., Result], *arguments) -> Result:
    return function(*arguments)
