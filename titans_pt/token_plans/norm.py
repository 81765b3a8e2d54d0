"""The norm's step."""

from collections.abc import Callable

from torch import Tensor, nn

from titans_pt.kernels import norm as kernels
from titans_pt.layers.norm import RMSNorm
from titans_pt.token_plans.plan import Unplanned, plain


def norm_step(norm: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Norm of ``x`` (B, ..., D), contiguous and with a fixed storage, and the step that fills it."""
    norm = plain(norm, RMSNorm)
    if kernels.unserved(x):
        raise Unplanned
    return kernels.prepared(x, norm.weight, norm.eps)
