"""The plan of MAB."""

from torch import Tensor

from titans_pt.kernels.one_token import Map, Maps, blend
from titans_pt.models.mixers.mab import MAB, MABState
from titans_pt.token_plans.attention import attention_plan
from titans_pt.token_plans.memory import memory_plan
from titans_pt.token_plans.mixers import plans
from titans_pt.token_plans.plan import TokenPlan, affine_map, weight_of


@plans(MAB)
def mab_plan(mixer: MAB, x: Tensor, term: Tensor) -> TokenPlan:
    attention = attention_plan(mixer.attention, x, prefix=False)
    memory = memory_plan(mixer.memory, x)
    share = Maps(len(x), affine_map(x, mixer.memory_share))
    mixed, mix = blend(attention.out, memory.out, share.out[0])
    out = Maps(len(x), Map(mixed, weight_of(mixer.out), term=term))

    def advance(state: MABState) -> MABState:
        state = MABState(attention.advance(state.attention), memory.advance(state.memory))
        share()
        mix()
        out()
        return state

    return TokenPlan(out.out[-1], lambda s: attention.accepts(s.attention) and memory.accepts(s.memory), advance)
