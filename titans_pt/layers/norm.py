"""RMSNorm in the model's layers."""

from collections.abc import Callable

from torch import Tensor, nn

from titans_pt.kernels import norm
from titans_pt.kernels.norm import rms_norm
from titans_pt.layers.token_plan import Unplanned


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dimension; on a CPU in one pass, where PyTorch's backward pass takes a dozen."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def token_step(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """The norm of ``x`` (B, ..., D), contiguous, which stays where it is, and the step that fills it."""
        if norm.unserved(x):
            raise Unplanned
        return norm.prepared(x, self.weight, self.eps)
