"""Settings of earlier versions: values for settings that did not exist then, and settings that are gone since."""

import copy
from typing import Any

from titans_pt.config.model import section_at
from titans_pt.config.plain import usual
from titans_pt.config.tree import Config
from titans_pt.errors import UserError

FORMER_DEFAULTS: dict[str, Any] = {
    "model.vocab_multiple": 1,
    "model.memory.forget_to": "zero",
    "model.memory.gates": "sigmoid",
    "model.mab.join": lambda mab: "added" if mab else "mixed",
    "model.memory.deep_steps": lambda memory: "full" if memory.get("depth") in (3, 4) else "small",
}
"""Settings that older stored trees lack -> the value for the earlier behaviour, or a function of the section.

Today's default may differ.
"""


def _mixers(tree: dict) -> list:
    given = (section_at(tree, ["model"]) or {}).get("mixers")
    return given if isinstance(given, list) else []


LAST_WITH_ALL = "0.3.0"
"""The last version that has all settings in GONE."""

_BORDER = "windows take earlier gradients again at the current chunk's start"
_DROP = "a full set drops its oldest cache"
GONE: dict[str, tuple[Any, str]] = {
    "model.memory.omega.border": ("refresh", _BORDER),
    "model.memory.atlas.border": ("refresh", _BORDER),
    "model.mab.attention_dropout": (0, "attention is never dropped"),
    "model.mab.join": ("mixed", "memories are always mixed in, since added ones do not help (docs/conversion.md)"),
    "model.memory.projections": (
        lambda tree: "affine" if "mab" in _mixers(tree) else "silu",
        "projections have biases and no SiLU in mab, SiLU and no biases in all other mixers",
    ),
    "model.memory.caching.drop": ("oldest", _DROP),
    "evaluation.caching.drop": ("oldest", _DROP),
}
"""Settings of earlier versions -> the value whose behaviour is left, or a function of the whole tree that returns it;
and what that behaviour is."""


def without_gone(tree: dict) -> dict:
    """A copy of ``tree`` without the settings in GONE.

    Raises:
        UserError: one of them has a value whose behaviour is gone.
    """
    tree = copy.deepcopy(tree)
    for path, (left, now) in GONE.items():
        *sections, key = path.split(".")
        section = section_at(tree, sections)
        if section is None or key not in section:
            continue
        given = usual(section.pop(key))
        if given != (left(tree) if callable(left) else left):
            raise UserError(f"{path}: given {given!r}, but the setting is gone: {now}; leave it out, or use titans-pt "
                            f"{LAST_WITH_ALL}")  # fmt: skip
    return tree


def as_stored(tree: dict) -> dict:
    """Completes a whole tree that an earlier version stored (a run's config.yaml, a checkpoint, an exported folder).

    Settings that did not exist yet get the value for that version's behaviour; settings that are gone are removed.

    Raises:
        UserError: a setting that is gone had another value than the one that is left.
    """
    tree = copy.deepcopy(tree)
    for path, value in FORMER_DEFAULTS.items():
        *sections, key = path.split(".")
        section = section_at(tree, sections)
        if section is not None and key not in section:
            section[key] = value(section) if callable(value) else value
    return without_gone(tree)


def as_begun(config: Config, tree: dict) -> Config:
    """``config`` for continuing a run that stored ``tree``.

    Settings in FORMER_DEFAULTS that ``config`` does not give keep their values from the beginning of the run, whatever
    today's defaults are.
    """
    tree = as_stored(tree)
    for path in FORMER_DEFAULTS:
        *sections, key = path.split(".")
        stored = section_at(tree, sections) or {}
        if key in stored:
            config = unless_given(config, [*sections, key], stored[key])
    return config


def unless_given(section: Any, keys: list[str], value: Any) -> Any:
    """A section with ``value`` set at the path ``keys``, unless the user gave a value there."""
    key, *deeper = keys
    if key not in type(section).model_fields:  # a mixer's own section, a dict
        (name,) = deeper
        return section.model_copy(update={key: {name: value} | section.section(key)})
    before = getattr(section, key)
    after = unless_given(before, deeper, value) if deeper else value
    if after == before or (not deeper and key in section.model_fields_set):
        return section
    return section.model_copy(update={key: after})
