"""The plan of MAL."""

from torch import Tensor

from titans_pt.kernels.one_token import Map, Maps, add
from titans_pt.models.mixers.mal import MAL, MALState
from titans_pt.token_plans.attention import attention_plan
from titans_pt.token_plans.memory import memory_plan
from titans_pt.token_plans.mixers import plans
from titans_pt.token_plans.norm import norm_step
from titans_pt.token_plans.plan import TokenPlan, weight_of


@plans(MAL)
def mal_plan(mixer: MAL, x: Tensor, term: Tensor) -> TokenPlan:
    memory = memory_plan(mixer.memory, x)
    gate = Map(x, weight_of(mixer.gate), activation=mixer.output_gate, factor=memory.out)
    recall = Maps(len(x), gate, Map(0, weight_of(mixer.memory_out)))
    recalled = seen = recall.out[1]
    rest, steps = term, []
    if mixer.residual:
        seen, see = add(x, None, recalled)
        rest, join = add(term, None, recalled)
        steps = [see, join]
    normal, normalise = norm_step(mixer.norm, seen)
    attention = attention_plan(mixer.attention, normal, prefix=mixer.persistent is not None)
    out = Maps(len(x), Map(attention.out, weight_of(mixer.out), term=rest))

    def advance(state: MALState) -> MALState:
        of_memory = memory.advance(state.memory)
        recall()
        for step in steps:
            step()
        normalise()
        of_attention = attention.advance(state.attention)
        out()
        return MALState(of_memory, of_attention)

    return TokenPlan(out.out[0], lambda s: attention.accepts(s.attention) and memory.accepts(s.memory), advance)
