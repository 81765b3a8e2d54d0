"""The plan of MAG."""

from torch import Tensor

from titans_pt.kernels.one_token import Map, Maps
from titans_pt.models.mixers.mag import MAG, MAGState
from titans_pt.token_plans.attention import attention_plan
from titans_pt.token_plans.gate import gate_step
from titans_pt.token_plans.memory import memory_plan
from titans_pt.token_plans.mixers import plans
from titans_pt.token_plans.plan import TokenPlan, weight_of


@plans(MAG)
def mag_plan(mixer: MAG, x: Tensor, term: Tensor) -> TokenPlan:
    attention = attention_plan(mixer.attention, x, prefix=mixer.persistent is not None)
    memory = memory_plan(mixer.memory, x)
    gated, gate = gate_step(mixer.gate, x, attention.out, memory.out)
    out = Maps(len(x), Map(gated, weight_of(mixer.out), term=term))

    def advance(state: MAGState) -> MAGState:
        state = MAGState(attention.advance(state.attention), memory.advance(state.memory))
        gate()
        out()
        return state

    return TokenPlan(out.out[0], lambda s: attention.accepts(s.attention) and memory.accepts(s.memory), advance)
