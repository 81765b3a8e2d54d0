"""Combinations of settings that nobody chose keep every promise.

Mixers, rules and their settings are drawn at random. A setting is drawn by its type, so that new ones are drawn too."""

import json
import random
import types
import typing

import pytest

from titans_pt.config import Config, MemoryConfig, Section
from titans_pt.config.files import load_config
from titans_pt.config.model import AttentionConfig, CachingConfig, HierarchyConfig
from titans_pt.errors import UserError
from titans_pt.inspection.promises import promises
from titans_pt.kernels.memory.rules import RULES
from titans_pt.models.mixers import MIXERS
from titans_pt.models.mixers.common import any_memory

UNSAFE = ("theta", "deep_steps")
"""Settings of the memory whose other values may diverge (docs/settings.md)."""
NUMBERS = [1, 2, 3, 4, 8]
SIZE = ["model.n_layers=2", "model.vocab_size=64", "model.mlp_hidden=16", "data.seq_len=64"]


def values(kind: typing.Any) -> list[typing.Any]:
    """Some values of a setting's type; [] for types that are not drawn, such as numbers between 0 and 1."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return list(inner)
    if origin is typing.Annotated:
        return values(inner[0])
    if origin in (typing.Union, types.UnionType):
        return [value for each in inner for value in values(each)]
    return {bool: [True, False], int: NUMBERS}.get(kind, [])


def drawn(draw: random.Random, path: str, section: type[Section], share: float) -> list[str]:
    """Overrides of about this share of a section's settings."""
    some = {name: values(field.annotation) for name, field in section.model_fields.items() if name not in UNSAFE}
    return [f"{path}.{name}={json.dumps(draw.choice(each))}" for name, each in some.items()
            if each and draw.random() < share]  # fmt: skip


def settings(draw: random.Random) -> list[str]:
    mixer, width, heads = draw.choice(sorted(MIXERS.built_in())), *draw.choice([(16, 2), (24, 3), (32, 2), (32, 4)])
    words = [*SIZE, f"model.mixers=[{mixer}]", f"model.d_model={width}", f"model.n_heads={heads}"]
    words += [f"model.window={draw.choice([4, 9, 16, 40])}", f"model.persistent_tokens={draw.choice([0, 3])}"]
    words += drawn(draw, f"model.{mixer}", MIXERS.find(mixer).Settings, 0.5)
    words += drawn(draw, "model.attention", AttentionConfig, 0.2)
    if not any_memory([mixer]):
        return words
    rule = draw.choice(sorted(RULES.built_in()))
    words += drawn(draw, "model.memory", MemoryConfig, 0.3)
    words += [f"model.memory.rule={rule}", *drawn(draw, f"model.memory.{rule}", RULES.find(rule).Settings, 0.6)]
    for name, section in (("caching", CachingConfig), ("hierarchy", HierarchyConfig)):
        if draw.random() < 0.15:
            words += [f"model.memory.{name}={{}}", *drawn(draw, f"model.memory.{name}", section, 0.4)]
    return words


def accepted(draw: random.Random) -> tuple[list[str], Config]:
    """The first drawn settings that are not refused."""
    while True:
        try:
            words = settings(draw)
            return words, load_config("quickstart", words)
        except UserError:
            continue


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_drawn_settings_keep_every_promise(seed):
    draw = random.Random(seed)
    words, config = accepted(draw)
    broken = [promise.line() for promise in promises(config.model, draw.choice([33, 50, 64]), seed) if not promise.kept]
    assert not broken, " ".join(words)
