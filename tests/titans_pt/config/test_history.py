"""Settings that are gone: older files, configs and commands that still have them."""

import pytest

from titans_pt.config import ModelConfig
from titans_pt.config.checks import completed
from titans_pt.config.files import load_config, load_stored
from titans_pt.config.history import GONE, as_begun
from titans_pt.config.yaml import write_yaml
from titans_pt.errors import UserError
from titans_pt.huggingface import TitansConfig

CASES = [
    ("model.memory.omega.border", ["model.memory.rule=omega"], "refresh", "carry"),
    ("model.memory.atlas.border", ["model.memory.rule=atlas"], "refresh", "truncate"),
    ("model.mab.attention_dropout", ["model.mixers=[mab]"], 0.0, 0.1),
    ("model.mab.join", ["model.mixers=[mab]"], "mixed", "added"),
    ("model.memory.projections", ["model.mixers=[mab]"], "affine", "silu"),
    ("model.memory.projections", ["model.mixers=[lmm]"], "silu", "affine"),
    ("model.memory.caching.drop", ["model.memory.caching={}"], "oldest", "spread"),
    ("evaluation.caching.drop", ["evaluation.caching={shares: sum}"], "oldest", "spread"),
]
"""A setting that is gone, settings of a run that had it, the value that is left, one that is refused."""
cases = pytest.mark.parametrize("path, words, left, other", CASES, ids=[f"{path}={left}" for path, _, left, _ in CASES])


def test_every_setting_that_is_gone_has_a_case():
    assert {path for path, *_ in CASES} == GONE.keys()


def with_setting(path, value, tree):
    """``tree`` with the value at the path, as an earlier version wrote it."""
    key, _, deeper = path.partition(".")
    return tree | {key: with_setting(deeper, value, tree.get(key) or {}) if deeper else value}


def refused(path, value):
    return pytest.raises(UserError, match=rf"^{path}: given {value!r}, but the setting is gone: .*; leave it out, or ")


@cases
def test_in_a_command_or_a_config(path, words, left, other, tmp_path):
    expected = load_config("quickstart", words)
    assert load_config("quickstart", [*words, f"{path}={left}"]) == expected
    with refused(path, other):
        load_config("quickstart", [*words, f"{path}={other}"])
    file = tmp_path / "mine.yaml"
    file.write_text(write_yaml(with_setting(path, left, {"inherit": "quickstart"})))
    assert load_config(file, words) == expected
    assert load_config(file, words, model=False).train == expected.train
    file.write_text(write_yaml(with_setting(path, other, {"inherit": "quickstart"})))
    for model in (True, False):
        with refused(path, other):
            load_config(file, words, model)


def test_a_form_that_is_gone(tmp_path):
    yaad = ["model.memory.rule=yaad"]
    refusal = pytest.raises(
        UserError, match="^model.memory.yaad.form: given 'coordinate'; allowed: 'radial' or 'switch'"
    )
    with refusal:
        load_config("quickstart", [*yaad, "model.memory.yaad.form=coordinate"])
    today = load_config("quickstart", yaad).model_dump(mode="json")
    file = tmp_path / "config.yaml"
    file.write_text(write_yaml(with_setting("model.memory.yaad.form", "coordinate", today)))
    with refusal:
        load_stored(file)


def test_a_conversion_from_before_memories_were_mixed():
    """Version 0.2.0 had no other way to join them: its memories were added."""
    today = load_config("quickstart", ["model.mixers=[mab]"]).model_dump(mode="json")
    older = with_setting("model.mab.attention_dropout", 0.0, today)
    with refused("model.mab.join", "added"):
        completed(older)


@cases
def test_in_what_an_earlier_version_stored(path, words, left, other, tmp_path):
    """In a run's config.yaml, a checkpoint or record, and an exported folder."""
    config = load_config("quickstart", words)
    older = today = config.model_dump(mode="json")
    for another, others, value, _ in CASES:
        older = with_setting(another, value, older) if others == words else older
    refusable = with_setting(path, other, older)
    file = tmp_path / "config.yaml"
    file.write_text(write_yaml(older))
    assert load_stored(file) == config and completed(older) == today
    assert as_begun(config, older) == config
    assert TitansConfig(older).model.memory == ModelConfig.model_validate(today["model"]).memory
    file.write_text(write_yaml(refusable))
    for read in (
        lambda: load_stored(file), lambda: completed(refusable), lambda: as_begun(config, refusable),
        lambda: TitansConfig(refusable),
    ):  # fmt: skip
        with refused(path, other):
            read()
