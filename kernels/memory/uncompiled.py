"""A call as a break in the graph of torch.compile, which would unroll its loop over blocks: minutes.

Who wants ``chunked`` compiled says backend="chunked". (The fused kernels are one operator of the graph.)
"""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


@torch.compiler.disable
def run(function: Callable[..., Result], *arguments) -> Result:
    return function(*arguments)
