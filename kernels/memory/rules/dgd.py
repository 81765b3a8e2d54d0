"""Delta gradient descent of Nested Learning (arXiv 2512.24695, Section 4): a step that first erases along its input."""

from typing import ClassVar

from torch import Tensor

from titans_pt.config import MemoryConfig
from titans_pt.config.sections import Need
from titans_pt.kernels.memory.rules.base import RULES, SquaredError


@RULES.register
class Dgd(SquaredError):
    """Titans' squared error. Each weight matrix W, whose input is x and whose output gets the gradient g, moves to

        argmin_W theta ||W^T x + g||^2 + ||W - (1 - alpha) W_{t-1}||^2
            = (I - theta' x x^T) (1 - alpha) W_{t-1} - theta' x g^T        theta' = theta / (1 + theta ||x||^2)

    Gradient descent has theta <W^T x, g> in place of the first square. A write replaces W's content along x instead of
    adding to it. theta' ||x||^2 < 1 keeps every write from overshooting in W. Momentum accumulates the last term, as in
    Titans; the paper has no momentum outside an ablation (model.memory.momentum=false).

    The paper prints theta / (1 + theta), which equals theta' for ||x|| = 1. Inputs of hidden layers are longer, and
    there the printed step may reverse W along x. The paper prints the erasing before the decay and for one matrix, with
    k k^T, which does not fit the second matrix of its own memory.
    """

    name: ClassVar[str] = "dgd"
    compiled_steps = True

    @classmethod
    def check(cls, config: MemoryConfig, need: Need):
        allowed = f"must be head with model.memory.rule={cls.name}, which erases whole matrices along their inputs"
        need(config.alpha == "head", "model.memory.alpha", config.alpha, allowed)

    def steps(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        short = theta / (1 + theta * x.square().sum(-1, keepdim=True))
        return short, short
