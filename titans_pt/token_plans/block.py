"""Plans of the two halves of a block, and how they are put on a model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from titans_pt.layers.documents import Documents
from titans_pt.models.backbone import Backbone, Block
from titans_pt.token_plans.mixers import mixer_plan
from titans_pt.token_plans.mlp import mlp_plan
from titans_pt.token_plans.norm import norm_step
from titans_pt.token_plans.plan import Module, TokenPlan, through_plan


def put_on(model: nn.Module):
    """Let a token that continues a state go through each block of ``model`` by a plan, if one serves.

    A second call changes nothing. The model's weights, states, training and copies are not affected.
    """
    backbones = [model] if isinstance(model, Backbone) else [m for m in model.modules() if isinstance(m, Backbone)]
    for block in (block for backbone in backbones for block in backbone):
        if type(block) is Block:
            block.__class__ = PlannedBlock


class PlannedBlock(Block):
    """A block that tries a plan first. An existing block gets this class, and keeps its hooks, names and weights."""

    def mix(self, x: Tensor, state: Any, documents: Documents | None) -> tuple[Tensor, Any]:
        found = None
        if state is not None and documents is None and self.continuum is None:
            found = through_plan(self, (self.mixer_norm, self.mixer), mixing_plan, x, state)
        return super().mix(x, state, documents) if found is None else found

    def feed(self, x: Tensor) -> Tensor:
        found = through_plan(self, (self.mlp_norm, self.mlp), feeding_plan, x, None)
        return super().feed(x) if found is None else found[0]


PlannedBlock.__name__ = Block.__name__  # FSDP and device_map find the classes of _no_split_modules by name


def mixing_plan(block: Block, x: Tensor) -> TokenPlan:
    """Plan of a block's first half for one token x (B, d_model)."""
    if isinstance(block.mixer_norm, nn.Identity):
        return mixer_plan(block.mixer, x, x)
    return _after_norm(x, block.mixer_norm, block.mixer, mixer_plan)


def feeding_plan(block: Block, x: Tensor) -> TokenPlan:
    """Plan of a block's second half for one token x (B, d_model)."""
    return _after_norm(x, block.mlp_norm, block.mlp, mlp_plan)


def _after_norm(
    x: Tensor, norm: nn.Module, part: Module, make: Callable[[Module, Tensor, Tensor], TokenPlan]
) -> TokenPlan:
    normal, normalise = norm_step(norm, x)
    plan = make(part, normal, x)

    def advance(state: Any) -> Any:
        normalise()
        return plan.advance(state)

    return TokenPlan(plan.out, plan.accepts, advance)
