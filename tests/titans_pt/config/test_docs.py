"""The JSON schema and the page of settings: current, complete, and equal to what the program accepts."""

import json
from functools import cache
from pathlib import Path
from typing import Annotated

import pytest
from jsonschema import Draft202012Validator, ValidationError
from pydantic import Field

from titans_pt.config import Config, Section
from titans_pt.config.docs import PAGE, SCHEMA, json_schema, settings_page, whole_tree
from titans_pt.config.plain import usual
from titans_pt.config.words import known_paths
from titans_pt.config.yaml import parse_yaml

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(json_schema())


def test_what_is_committed_is_current():
    remedy = "a section in titans_pt/config has changed: run `make settings`"
    assert json.loads((ROOT / SCHEMA).read_text()) == json_schema(), remedy
    assert (ROOT / PAGE).read_text() == settings_page(), remedy


def test_every_setting_has_a_doc():
    schema = json_schema()
    for name, section in {"the whole tree": schema, **schema["$defs"]}.items():
        for key, field in section["properties"].items():
            assert field.get("description"), f"{key} of {name}: write its doc under it in titans_pt/config"


def test_the_page_has_every_setting():
    page = settings_page()
    for path in known_paths(whole_tree()):
        shown = path.replace(".0.", "[].")
        assert f"| `{shown}` |" in page or f"\n## {shown}\n" in page, shown


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_configs_keep_to_the_schema_and_lead_editors_to_it(path):
    text = path.read_text()
    validator().validate(usual(parse_yaml(text, path.name)))
    start, _, place = text.partition("\n")[0].partition("$schema=")
    assert (start, (path.parent / place).resolve()) == ("# yaml-language-server: ", ROOT / SCHEMA)


def test_the_schema_takes_the_resolved_tree_and_what_yaml_writes():
    Draft202012Validator.check_schema(json_schema())
    validator().validate(Config().model_dump(mode="json"))
    text = "inherit: [a.yaml, b.yaml]\ntrain: {lr: 3e-4, clip: 1, stop_at: null}"
    validator().validate(usual(parse_yaml(text, "")))


@pytest.mark.parametrize("text", [
    "train: {learning_rate: 1}", "lr: 1", "train: {max_steps: '10'}", "train: {max_steps: 0}", "inherit: 3",
    "train: {precision: fp16}", "train: {betas: [0.9]}", "data: {sources: []}", "data: {sources: [{kind: web}]}",
    "data: {sources: [{minimum: {score: high}}]}", "- 1", "model: {windw: 3}", "model: {mac: {segmnt: 3}}",
])  # fmt: skip
def test_the_schema_refuses(text):
    with pytest.raises(ValidationError):
        validator().validate(usual(parse_yaml(text, "")))


class Leaf(Section):
    """Leaf of the tree."""

    size: Annotated[int, Field(ge=1, le=9)] = 2
    """Its ``size``, 1|2."""


class Tree(Section):
    """A tree with sections in every place."""

    plain: Leaf = Leaf()
    several: list[Leaf] = [Leaf()]
    """Some."""
    named: dict[str, Leaf] = {"one": Leaf(size=3)}
    maybe: Leaf | None = None
    deep: dict[str, list[Leaf]] = {}


def test_sections_are_followed_wherever_they_stand():
    page = settings_page(Tree)
    for path in ("plain", "several[]", "named.NAME", "maybe", "deep.NAME[]"):
        assert f"\n## {path}\n" in page
        assert f"| `{path}.size` | integer ≥ 1, ≤ 9 | `2` | Its `size`, 1\\|2. |" in page
    assert "\n## several[]\n\nSome.\n" in page
    assert "\n## plain\n\nLeaf of the tree.\n" in page
    assert "| `maybe` | section or `null` | `null` |" in page
    assert "| `deep` | mapping, NAME: list: section | `{}` |" in page
    assert "| `named` | mapping, NAME: section |  |" in page
