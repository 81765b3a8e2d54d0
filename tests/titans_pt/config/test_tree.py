import copy

import pytest

from titans_pt.config import Config, MemoryConfig, ModelConfig, config_hash
from titans_pt.config import history as module
from titans_pt.config.checks import checked, completed
from titans_pt.config.files import load_stored
from titans_pt.config.history import as_begun
from titans_pt.errors import UserError


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        Config().train.lr = 1.0


def test_the_hash_is_that_of_the_values():
    assert config_hash(ModelConfig()) == config_hash(ModelConfig(d_model=768))
    assert config_hash(ModelConfig()) != config_hash(ModelConfig(d_model=384))


def test_a_pattern_fills_the_layers():
    assert ModelConfig(mixers=["lmm", "swa"], n_layers=5).pattern == ["lmm", "swa", "lmm", "swa", "lmm"]


def test_what_an_earlier_version_stored():
    whole = checked(Config()).model_dump(mode="json")
    tree = copy.deepcopy(whole)
    tree["train"].pop("compile")
    assert completed(tree) == whole
    own = tree["model"].pop("mac")  # once beside the settings of all mixers
    tree["model"] |= {"segment": 64, "memory_tokens": 32}
    assert completed(tree)["model"] == whole["model"] | {"mac": own | {"segment": 64, "memory_tokens": 32}}
    tree["model"]["mixers"] = ["lmm"]
    assert "mac" not in completed(tree)["model"]
    assert completed({"model": {"gone": 1}}) == {"model": {"gone": 1}}


@pytest.fixture
def newer(monkeypatch):
    """A stored tree without a newer setting: False before the setting existed, True by default today."""
    monkeypatch.setattr(module, "FORMER_DEFAULTS", {"model.memory.writes": False})
    tree = checked(Config()).model_dump(mode="json")
    tree["model"]["memory"].pop("writes")
    return tree


def test_a_stored_tree_means_what_its_version_did(newer):
    assert completed(newer)["model"]["memory"]["writes"] is False
    assert "writes" not in newer["model"]["memory"]
    newer["model"]["memory"]["writes"] = True
    assert completed(newer)["model"]["memory"]["writes"] is True


def test_every_former_value_is_one_of_its_setting():
    for path in module.FORMER_DEFAULTS.keys() - module.GONE.keys():
        value = module.FORMER_DEFAULTS[path]
        section, _, key = path.rpartition(".")
        kinds = {"model": ModelConfig, "model.memory": MemoryConfig}
        assert kinds[section](**{key: value({}) if callable(value) else value})


@pytest.mark.parametrize("depth, steps", [(1, "small"), (2, "small"), (3, "full"), (4, "full")])
def test_a_deep_memory_goes_on_with_the_steps_it_began_with(depth, steps):
    """A memory of one or two matrices, whose steps never changed, is the same model with the new setting."""
    config = checked(Config(model=ModelConfig(memory=MemoryConfig(depth=depth))))
    tree = config.model_dump(mode="json")
    del tree["model"]["memory"]["deep_steps"]
    assert completed(tree)["model"]["memory"]["deep_steps"] == steps
    assert as_begun(config, tree).model.memory.deep_steps == steps


def test_a_wrong_depth_in_the_config_of_an_earlier_version_is_one_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {memory: {depth: }}")
    with pytest.raises(UserError, match="model.memory.depth: given None; allowed: .*integer"):
        load_stored(path)


def test_a_run_goes_on_as_it_began(newer):
    assert as_begun(Config(), newer).model.memory.writes is False
    given = Config(model=ModelConfig(memory=MemoryConfig(writes=True)))
    assert as_begun(given, newer) == given
    newer["model"]["memory"]["writes"] = True
    assert as_begun(Config(), newer) == Config()


def test_what_is_listed_twice_is_evaluated_once():
    given = {
        "suites": ["needle", "perplexity", "needle"],
        "needle": {"tasks": ["niah_single_2", "niah_single_1", "niah_single_2"], "lengths": [512, 256, 512]},
        "babilong": {"tasks": ["qa2", "qa2", "qa1"], "lengths": [512, 512]}, "commonsense": {"tasks": ["piqa", "piqa"]},
    }  # fmt: skip
    found = Config.model_validate({"evaluation": given}).evaluation
    assert found.suites == ["needle", "perplexity"] and found.commonsense.tasks == ["piqa"]
    assert found.needle.tasks == ["niah_single_2", "niah_single_1"] and found.needle.lengths == [512, 256]
    assert found.babilong.tasks == ["qa2", "qa1"] and found.babilong.lengths == [512]
