"""Defaults of mixers follow the model's size: missing settings are set to fit, and fitting defaults are unchanged."""

import pytest

from titans_pt.config import MemoryConfig, config_hash
from titans_pt.config.checks import checked, completed
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.kernels.memory.rules import RULES, Rule
from titans_pt.models.mixers import MIXERS


def loaded(folder, name, *overrides, text="", length=256):
    (folder / "config.yaml").write_text(f"data: {{seq_len: {length}}}\ntrain: {{batch_tokens: {length}}}\n{text}")
    return load_config(folder / "config.yaml", [f"model.mixers=[{name}]", *overrides])


@pytest.mark.parametrize("name", MIXERS.built_in())
def test_every_mixer_goes_with_the_quickstart_and_with_other_sizes(name, tmp_path):
    load_config("quickstart", [f"model.mixers=[{name}]"])
    for width, length in ((192, 256), (200, 8), (48, 100), (1000, 1024)):
        config = loaded(tmp_path, name, f"model.d_model={width}", length=length)
        assert checked(config) == config, "settled"


@pytest.mark.parametrize("name", MIXERS.built_in())
def test_what_fits_is_what_it_always_was(name, tmp_path):
    """A run that began with these settings can be resumed, and its hash is the same."""
    config = loaded(tmp_path, name, length=4096)
    own = MIXERS.find(name).Settings().model_dump(mode="json")
    assert config.model.section(name) == own
    assert (config.model.n_heads, config.model.window, config.model.memory.chunk_size) == (16, 2048, 16)
    assert config_hash(type(config).model_validate(completed(config.model_dump(mode="json")))) == config_hash(config)


@pytest.mark.parametrize(("name", "overrides", "expected"), [
    ("deltanet", ["model.d_model=192"], {"deltanet": {"head_width": 64}}),
    ("deltanet", ["model.d_model=200"], {"deltanet": {"head_width": 100}}),
    ("retnet", ["model.d_model=162"], {"retnet": {"head_width": 54}}),
    ("hgrn2", ["model.d_model=64"], {"hgrn2": {"head_width": 64}}),
    ("mamba2", ["model.d_model=50"], {"mamba2": {"head_width": 50}}),
    ("ttt_linear", ["model.d_model=96"], {"ttt_linear": {"head_width": 32}}),
    ("gla", ["model.d_model=50"], {"gla": {"n_heads": 1}}),
    ("gated_deltanet", ["model.d_model=40"], {"gated_deltanet": {"n_heads": 6}}),
    ("gated_deltanet", ["model.d_model=20"], {"gated_deltanet": {"n_heads": 5}}),
    ("rmt", [], {"rmt": {"segment": 128}}),
    ("mac", [], {"mac": {"segment": 128, "memory_tokens": 64}}),
    ("mac", ["model.memory.chunk_size=48"], {"mac": {"segment": 96, "memory_tokens": 48}}),
    ("mac", ["model.mac.segment=48"], {"mac": {"segment": 48, "memory_tokens": 24}}),
    ("mac", ["model.mac.segment=256"], {"mac": {"segment": 256, "memory_tokens": 256}}),
    ("swa", ["model.d_model=50"], {"window": 256, "n_heads": 5}),
    ("lmm,swa", ["model.d_model=50"], {"window": 256, "n_heads": 5}),
    ("lmm", ["model.d_model=50"], {"window": 2048, "n_heads": 10}),
    ("lmm", ["model.d_model=50", "model.memory.n_heads=2"], {"n_heads": 16}),
    ("lmm", ["model.memory.hierarchy={}"], {"memory": {"hierarchy": {"chunk": 64, "shard": 64}}}),
    ("lmm", ["model.memory.hierarchy={chunk: 48}"], {"memory": {"hierarchy": {"chunk": 48, "shard": 2016}}}),
])  # fmt: skip
def test_what_does_not_fit_is_replaced(name, overrides, expected, tmp_path):
    tree = loaded(tmp_path, name, *overrides).model.model_dump()

    def compare(found, wanted):
        for key, value in wanted.items():
            if isinstance(value, dict):
                compare(found[key], value)
            else:
                assert found[key] == value, key

    compare(tree, expected)


@pytest.mark.parametrize("override", [
    "model.deltanet.head_width=128", "model.window=2048", "model.n_heads=16", "model.mac.segment=512",
    "model.rmt.segment=512", "model.gla.n_heads=7", "model.memory.chunk_size=512",
])  # fmt: skip
def test_what_is_given_stays_and_is_refused(override, tmp_path):
    name = {"window": "swa", "n_heads": "swa", "memory": "lmm"}.get(override.split(".")[1].partition("=")[0])
    name = name or override.split(".")[1]
    with pytest.raises(UserError, match=f"{override.partition('=')[0]}: given {override.partition('=')[2]}; "):
        loaded(tmp_path, name, override, "model.d_model=200")


@pytest.mark.parametrize("name, rule", [("hope", "dgd"), *(("lmm", rule) for rule in RULES.built_in())])
def test_a_memory_that_reads_its_chunks_start_has_two_chunks(name, rule, tmp_path):
    starts = name == "hope" or Rule.of(MemoryConfig(rule=rule)).nonlinear
    words = [f"model.memory.rule={rule}"]
    assert loaded(tmp_path, name, *words, length=12).model.memory.chunk_size == (3 if starts else 12)
    assert loaded(tmp_path, name, *words, length=64).model.memory.chunk_size == 16
    words.append("model.memory.chunk_size=64")
    if not starts:
        assert loaded(tmp_path, name, *words, length=64).model.memory.chunk_size == 64
        return
    with pytest.raises(UserError, match="model.memory.chunk_size: given 64; below data.seq_len=64; tokens read the"):
        loaded(tmp_path, name, *words, length=64)


def test_a_mixers_own_settings_that_are_wrong_are_said_to_be(tmp_path):
    with pytest.raises(UserError, match="model.gla.n_heads: given 'x'; allowed: a valid integer"):
        loaded(tmp_path, "gla", "model.gla.n_heads=x")
    with pytest.raises(UserError, match="model.mac.segment: given 'x'; allowed: a valid integer"):
        loaded(tmp_path, "mac", "model.mac.segment=x")
