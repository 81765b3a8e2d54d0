"""The gate between two branches."""

from collections.abc import Callable

from torch import Tensor, nn

from titans_pt.kernels.one_token import Map, Maps, blend
from titans_pt.models.mixers.common import BranchGate
from titans_pt.token_plans.norm import norm_step
from titans_pt.token_plans.plan import Unplanned, plain, weight_of


def gate_step(gate: nn.Module, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Output of the gate for x and the branches a, b, (B, d_model) like them, and the step that fills it."""
    gate = plain(gate, BranchGate)
    if gate.linear is None:
        raise Unplanned
    a, normalise_a = norm_step(gate.norm_a, a)
    b, normalise_b = norm_step(gate.norm_b, b)
    share = Maps(len(x), Map(x, weight_of(gate.linear), activation="sigmoid"))
    out, mix = blend(a, b, share.out[0])

    def step():
        normalise_a()
        normalise_b()
        share()
        mix()

    return out, step
