"""Titans (arXiv 2501.00663), Eq. 11-14: the squared error, momentum, forgetting."""

from typing import ClassVar

from titans_pt.kernels.memory.rules.base import RULES, SquaredError


@RULES.register
class Titans(SquaredError):
    """The default update of :class:`titans_pt.kernels.memory.rules.Rule` with the squared error."""

    name: ClassVar[str] = "titans"


TITANS = Titans()
"""The default rule."""
