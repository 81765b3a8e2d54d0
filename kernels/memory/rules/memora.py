"""Memora of MIRAS (arXiv 2504.13173, Section 5): weights that are distributions, with relative entropy as retention."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from titans_pt.config import Section
from titans_pt.kernels.memory.rules.base import RULES, Own, Rule


@RULES.register
class Memora(Rule):
    """Titans' squared error. Logits z accumulate, and a chunk uses scale * softmax(z) over the inputs of each output.

    This is exactly W_t = scale * softmax(alpha_t log W_{t-1} - theta_t u_t), since z_t = alpha_t z_{t-1} - theta_t u_t.
    The paper drops the scale from Eq. 21 to Eq. 27 and names no axis. Its chunkwise form sums W instead of z; weights
    may then be negative when the next logarithm is taken.
    """

    name: ClassVar[str] = "memora"
    needs_norm: ClassVar[bool] = True
    step: float = 0.25

    class Settings(Section):
        scale: Annotated[float, Field(gt=0.0)] | None = None
        """Sum of the weights that lead to an output. Null: their number, which makes their mean 1; with 1 the inputs of
        the next layer all but vanish."""

    settings: Settings

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return error.square().sum(-1)

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        return 2 * error

    def share(self, v: Tensor, own: Own) -> Tensor | None:
        """A step in z multiplies the weights, and long values make this factor exponentially large."""
        return v.square().mean(-1).clamp(min=1).rsqrt()

    def met(self, weights: Tensor) -> Tensor:
        return (self.settings.scale or weights.shape[-2]) * weights.softmax(-2)
