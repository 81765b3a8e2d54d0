"""Differentiable exchanges inside a tensor group, each with its counterpart in the backward pass.

One rule holds everywhere: a tensor that every rank holds whole has its whole gradient on every rank; a rank's
part has that part's gradient. Each exchange is therefore correct by itself, whatever comes before or after it.
(Megatron-LM, arXiv 1909.08053, calls copy and reduce f and g; the sequence's are those of arXiv 2205.05198.)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titans_pt.errors import UserError
from titans_pt.parallel.topology import RankGroup

TIME = 1
"""Dimension of (B, T, ...) along which parallel.sequence splits."""


class _Exchange(torch.autograd.Function):
    """forward(x); its vector-Jacobian product is ``backward``."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]):
        ctx.backward_exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.backward_exchange(gradient), None, None


class Exchanges:
    """The exchanges of one tensor group.

    Args:
        group: the ranks that share a model.
        sequence: whether the tensors between mixers and MLPs (norms, residuals) are split along time
            (parallel.sequence); else they are whole on every rank.
    """

    def __init__(self, group: RankGroup, sequence: bool = False):
        self.group, self.sequence = group, sequence

    def copy(self, x: Tensor) -> Tensor:
        """Whole -> whole; each rank then computes something else from it."""
        return _Exchange.apply(x, lambda x: x.view_as(x), self.group.all_reduce)

    def reduce(self, x: Tensor) -> Tensor:
        """Each rank's summand -> the whole sum."""
        return _Exchange.apply(x, self.group.all_reduce, lambda g: g)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Parts along ``dim`` -> the whole."""
        group = self.group
        return _Exchange.apply(x, lambda x: group.all_gather(x, dim), lambda g: group.part(g, dim).contiguous())

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """Whole -> this rank's part along ``dim``."""
        group = self.group
        return _Exchange.apply(x, lambda x: group.part(x, dim).contiguous(), lambda g: group.all_gather(g, dim))

    def open(self, x: Tensor) -> Tensor:
        """Gathers the whole sequence, before a mixer or an MLP, from the ranks' parts."""
        return self.gather(x, TIME) if self.sequence else x

    def close(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`open`."""
        return self.split(self._divisible(x), TIME) if self.sequence else x

    def open_copy(self, x: Tensor) -> Tensor:
        """open, then copy, in one exchange each way."""
        group = self.group
        if not self.sequence:
            return self.copy(x)
        return _Exchange.apply(x, lambda x: group.all_gather(x, TIME), lambda g: group.reduce_scatter(g, TIME))

    def reduce_close(self, x: Tensor) -> Tensor:
        """reduce, then close, in one exchange each way."""
        group = self.group
        if not self.sequence:
            return self.reduce(x)
        x = self._divisible(x)
        return _Exchange.apply(x, lambda x: group.reduce_scatter(x, TIME), lambda g: group.all_gather(g, TIME))

    def _divisible(self, x: Tensor) -> Tensor:
        """x, if its steps divide among the ranks: unequal parts would be put together in another order, or not at all.

        Raises:
            UserError: they do not.
        """
        length, ranks = x.shape[TIME], self.group.size
        if length % ranks:
            raise UserError(f"parallel.sequence: the {length} steps of a sequence do not divide among "
                            f"parallel.tensor={ranks} ranks; set parallel.sequence=false")  # fmt: skip
        return x
