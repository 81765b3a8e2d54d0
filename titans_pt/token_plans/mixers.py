"""Mixers that have a plan, found by class."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import Tensor

from titans_pt.models.mixers.base import Mixer
from titans_pt.token_plans.plan import TokenPlan, Unplanned

M = TypeVar("M", bound=Mixer)
Planner = Callable[[M, Tensor, Tensor], TokenPlan]
"""(mixer, x, term), both (B, d_model) -> the plan of term + the output of the mixer's ``forward`` for x, with the same
states. It raises Unplanned if there is no plan for the mixer's settings."""
_MIXERS, _HERE = "titans_pt.models.mixers.", "titans_pt.token_plans."
_planners: dict[type[Mixer], Planner[Any]] = {}


def plans(kind: type[M]) -> Callable[[Planner[M]], Planner[M]]:
    """Decorates the planner of ``kind``, and of the classes derived from it that keep its ``forward``."""

    def registered(planner: Planner[M]) -> Planner[M]:
        _planners[kind] = planner
        return planner

    return registered


def planner_of(kind: type[M]) -> Planner[M] | None:
    """The planner of a class's ``forward``; None if that has none."""
    for base in kind.__mro__:
        name = base.__module__.removeprefix(_MIXERS)
        if base not in _planners and name != base.__module__ and find_spec(_HERE + name):
            import_module(_HERE + name)
        if base in _planners:
            return _planners[base]
        if "forward" in vars(base):
            return None
    return None


def mixer_plan(mixer: Mixer, x: Tensor, term: Tensor) -> TokenPlan:
    """Plan of ``mixer`` for x and term (:data:`Planner`).

    Raises:
        Unplanned: the mixer has no plan.
    """
    planner = planner_of(type(mixer))
    if planner is None:
        raise Unplanned
    return planner(mixer, x, term)
