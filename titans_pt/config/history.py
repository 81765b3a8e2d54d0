"""Settings stored by earlier versions: what their missing settings meant."""

import copy
from typing import Any, TypeVar

from titans_pt.config.fields import Section
from titans_pt.config.tree import Config

S = TypeVar("S", bound=Section)

FORMER_DEFAULTS: dict[str, Any] = {
    "model.vocab_multiple": 1,
    "model.memory.forget_to": "zero",
    "model.memory.gates": "sigmoid",
    "model.memory.projections": "silu",
    "model.mab.join": "added",
    "model.memory.deep_steps": lambda memory: "full" if memory.get("depth", 2) > 2 else "small",
}
"""Settings that older stored trees lack -> what the code did before, or a function of their section that says it.
Today's default may be another."""


def as_stored(tree: dict) -> dict:
    """A tree that an earlier version stored whole (a run's config.yaml, a checkpoint, an exported folder), completed:
    settings that did not exist yet get the value that stands for what that version did."""
    tree = copy.deepcopy(tree)
    for path, value in FORMER_DEFAULTS.items():
        *sections, key = path.split(".")
        section: Any = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key not in section:
            section[key] = value(section) if callable(value) else value
    return tree


def as_begun(config: Config, tree: dict) -> Config:
    """``config`` for continuing a run that stored ``tree``: the settings in FORMER_DEFAULTS that ``config`` does not
    give keep the values with which the run began, whatever today's defaults are."""
    tree = as_stored(tree)
    for path in FORMER_DEFAULTS:
        config = _unless_given(config, path.split("."), tree)
    return config


def _unless_given(section: S, keys: list[str], tree: Any) -> S:
    """The section with the value that ``tree`` has at the place ``keys``, unless the section was given one."""
    key, *deeper = keys
    if not isinstance(tree, dict) or key not in tree or (not deeper and key in section.model_fields_set):
        return section
    value = tree[key]
    if deeper:
        inner = getattr(section, key, None)
        if not isinstance(inner, Section):  # a mixer's own settings, whose given ones are not known any more
            return section
        value = _unless_given(inner, deeper, value)
    return section.model_copy(update={key: value})
