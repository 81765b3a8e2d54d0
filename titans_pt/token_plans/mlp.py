"""The plan of SwiGLU."""

from torch import Tensor, nn

from titans_pt.kernels.one_token import Map, Maps
from titans_pt.layers.mlp import SwiGLU
from titans_pt.token_plans.plan import TokenPlan, own, weight_of


def mlp_plan(mlp: nn.Module, x: Tensor, term: Tensor) -> TokenPlan:
    """Plan of term + mlp(x), for x and term (B, d_model)."""
    mlp = own(mlp, SwiGLU)
    gate, up, down = (weight_of(part) for part in (mlp.gate, mlp.up, mlp.down))
    step = Maps(len(x), Map(x, gate, activation="silu"), Map(x, up, factor=0), Map(1, down, term=term))

    def advance(state: None):
        step()

    return TokenPlan(step.out[-1], lambda state: True, advance)
