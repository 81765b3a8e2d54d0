"""Titans (arXiv 2501.00663), Eq. 11-14: the squared error."""

from typing import ClassVar

from torch import Tensor

from titans_pt.kernels.memory.rules.base import RULES, Own, Rule


@RULES.register
class Titans(Rule):
    """||M(k) - v||^2, without the half that others put before it: a theta of ours is half of theirs."""

    name: ClassVar[str] = "titans"

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return error.square().sum(-1)

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return 2 * error

    def gradient_backward(self, upstream: Tensor, error: Tensor, v: Tensor, own: Own):
        return 2 * upstream, None, []


TITANS = Titans()
"""The rule where none is named."""
