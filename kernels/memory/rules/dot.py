"""The dot product as the inner loss (Hebbian): a memory that adds every value and corrects nothing."""

from typing import ClassVar

from torch import Tensor

from titans_pt.kernels.memory.rules.base import RULES, Own, Rule


@RULES.register
class Dot(Rule):
    """The loss -2 <M(k), v>: Titans' ||M(k) - v||^2 without ||M(k)||^2, the term that corrects.

    With one matrix, no LayerNorm and no residual it is linear attention with decay and momentum. ATLAS (arXiv
    2505.23735) uses this loss in its Dot and DeepTransformers, and prints the update with the sign of ascent in
    Eq. 28-31.
    """

    name: ClassVar[str] = "dot"

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return -2 * ((v + error) * v).sum(-1)

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return (-2 * v).expand_as(error)

    def gradient_backward(self, upstream: Tensor, error: Tensor, v: Tensor, own: Own):
        return upstream.new_zeros(error.shape), -2 * upstream, []
