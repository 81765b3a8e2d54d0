"""The plan of LMM."""

from torch import Tensor

from titans_pt.kernels.one_token import Map, Maps
from titans_pt.models.mixers.lmm import LMM
from titans_pt.token_plans.memory import memory_plan
from titans_pt.token_plans.mixers import plans
from titans_pt.token_plans.plan import TokenPlan, weight_of


@plans(LMM)
def lmm_plan(mixer: LMM, x: Tensor, term: Tensor) -> TokenPlan:
    plan = memory_plan(mixer.memory, x)
    gate = Map(x, weight_of(mixer.gate), activation=mixer.output_gate, factor=plan.out)
    return plan.then(Maps(len(x), gate, Map(0, weight_of(mixer.out), term=term)))
