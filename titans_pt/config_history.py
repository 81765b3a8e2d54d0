"""Settings of earlier versions: what a stored tree meant by what it lacks."""

import copy
from typing import Any

from pydantic import ValidationError

from titans_pt.config import Config, Section
from titans_pt.config_check import checked
from titans_pt.errors import UserError

FORMER_DEFAULTS = {"model.memory.forget_to": "zero", "model.memory.gates": "sigmoid"}
"""Settings that are newer than stored trees which lack them, and whose default is not what the code did before."""


def as_stored(tree: dict) -> dict:
    """A tree that an earlier version stored whole (a run's config.yaml, a checkpoint, an exported folder), with what it
    meant by the settings that it did not have yet."""
    tree = copy.deepcopy(tree)
    for path, value in FORMER_DEFAULTS.items():
        *sections, key = path.split(".")
        section = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.setdefault(key, value)
    return tree


def completed(tree: dict) -> dict:
    """A stored tree with the settings that are new since then at what was done before they existed.

    A tree that is not valid any more comes back as it is: its differences are then told by name.
    """
    try:
        return checked(Config.model_validate(as_stored(tree))).model_dump(mode="json")
    except (ValidationError, UserError):
        return tree


def as_begun(config: Config, tree: dict) -> Config:
    """``config`` for going on with a run that stored ``tree``: of the settings in FORMER_DEFAULTS, those that
    nobody gave are what they were when it began, whatever today's default is."""
    tree = as_stored(tree)
    for path in FORMER_DEFAULTS:
        config = _unless_given(config, path.split("."), tree)
    return config


def _unless_given(section: Section, keys: list[str], tree: Any) -> Section:
    """The section with the value that ``tree`` has at the place ``keys``, unless the section was given one."""
    key, *deeper = keys
    if not isinstance(tree, dict) or key not in tree or (not deeper and key in section.model_fields_set):
        return section
    value = _unless_given(getattr(section, key), deeper, tree[key]) if deeper else tree[key]
    return section.model_copy(update={key: value})
