"""The configs of each size have equally many parameters and follow the paper's recipe."""

from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.helpers.mixers import BASELINES
from titans_pt.config.files import load_config
from titans_pt.models import build_model

CONFIGS = Path(__file__).parents[3] / "configs"
SIZES = {
    "170m": (3e-3, 15e9), "340m": (1.5e-3, 15e9), "400m": (1.5e-3, 15e9), "760m": (1.25e-3, 30e9), "1.3b": (7e-4, 1e11),
}  # fmt: skip
"""Learning rate and tokens (Titans, Table 5)."""
PATTERNS = {
    "transformer": ["attention"],
    "samba": ["mamba", "swa"],
    "gated_deltanet_h1": ["gated_deltanet", "swa"],
    "gated_deltanet_h2": ["mamba2", "gated_deltanet", "swa"],
} | {name: [name] for name in ("lmm", "mac", "mag", "mal", "swa", "rmt", *BASELINES)}
FIRST = ("lmm", "mac", "mag", "mal", "transformer")
PARAMETERS = {
    "170m": (170_743_728, 170_918_832, 170_872_752, 170_752_944, 169_691_904),
    "340m": (341_053_056, 341_618_304, 339_922_560, 337_931_904, 341_099_520),
    "760m": (762_548_928, 763_691_712, 763_507_392, 762_585_792, 757_016_064),
}
"""Parameter counts of FIRST, as in checkpoints of version 0.1.0."""


def config_of(size, model):
    return load_config(CONFIGS / size / f"{model}.yaml")


def without_values(config):
    """Build a model without initial values, which take most of the time on the meta device."""
    left_alone = dict.fromkeys(("normal_", "uniform_", "fill_", "zero_", "copy_"), lambda x, *a, **k: x)
    with torch.device("meta"), patch.multiple(torch.Tensor, **left_alone):
        return build_model(config)


@cache
def parameters(size, model):
    return sum(p.numel() for p in without_values(config_of(size, model).model).parameters())


@pytest.mark.parametrize("size", ["170m", *(pytest.param(s, marks=pytest.mark.thorough) for s in SIZES if s != "170m")])
def test_all_models_of_a_size_have_equally_many_parameters(size):
    """Counts are within one percent of the Transformer's, with MLP widths in multiples of 64. The Transformer's count
    is within one percent of the size's name."""
    assert {path.stem for path in (CONFIGS / size).glob("*.yaml")} == {"size", *PATTERNS}
    name = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    one = parameters(size, "transformer")
    assert abs(one / name - 1) < 0.01
    far = {model: parameters(size, model) / one - 1 for model in PATTERNS}
    assert {model: f"{100 * by:+.2f} %" for model, by in far.items() if abs(by) > 0.01} == {}
    assert all(config_of(size, model).model.mlp_hidden % 64 == 0 for model in PATTERNS)


def without_embedding(config):
    model = without_values(config.model)
    return sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()


def test_all_models_of_the_tiny_study_have_equally_many_parameters():
    """Models have 1 to 2 million parameters without the shared embedding, within one percent of the Transformer's."""
    # Models that only this size has:
    patterns = PATTERNS | {"omeganet": ["lmm"], "lmm_grm": ["lmm"], "mac_grm": ["mac"], "hope": ["hope"]}
    assert {path.stem for path in (CONFIGS / "tiny").glob("*.yaml")} == {"size", *patterns}
    configs = {model: config_of("tiny", model) for model in patterns}
    one = without_embedding(configs["transformer"])
    assert 1e6 < one < 2e6
    for model, config in configs.items():
        assert abs(without_embedding(config) / one - 1) < 0.01, model
        assert config.model.pattern == (patterns[model] * 4)[:4]
        assert (config.model.vocab_size, config.data.seq_len, config.model.window) == (4096, 512, 128)
        assert config.train.max_steps * config.train.batch_tokens >= 4e6
        assert (config.model.memory.gates, config.model.memory.forget_to) == ("sigmoid", "start")
        assert config.run.dir == f"runs/tiny-{model}"


@pytest.mark.parametrize("study", ["recall", "needles"])
def test_the_baselines_of_the_studies_of_recall_have_as_many_parameters_as_the_largest_titan(study):
    base = load_config(CONFIGS / f"{study}.yaml")

    def titan(mixer):
        return without_embedding(base.model_copy(update={"model": base.model.model_copy(update={"mixers": [mixer]})}))

    largest = max(map(titan, ("lmm", "mac", "mag", "mal")))
    paths = sorted((CONFIGS / study).glob("*.yaml"))
    assert {path.stem for path in paths} == {*PATTERNS, "lmm-hierarchy", "hope"}
    for path in paths:
        config = load_config(path)
        assert abs(without_embedding(config) / largest - 1) < 0.01, path
        assert (config.data, config.train) == (base.data, base.train)


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_first_models_stay_as_they_were(size):
    assert tuple(parameters(size, model) for model in FIRST) == PARAMETERS[size]


@pytest.mark.parametrize("size", SIZES)
def test_recipe(size):
    lr, tokens = SIZES[size]
    for model, pattern in PATTERNS.items():
        config = config_of(size, model)
        assert config.model.pattern == (pattern * config.model.n_layers)[: config.model.n_layers]
        assert config.train.lr == lr
        assert abs(config.train.max_steps * config.train.batch_tokens / tokens - 1) < 1e-3
        assert (config.train.batch_tokens, config.data.seq_len, config.train.clip) == (2**19, 4096, 1.0)
        assert config.run.dir == f"runs/{size}-{model}"
        assert config.model.d_model // config.model.memory_heads == 64


def test_every_config_is_valid():
    for path in CONFIGS.rglob("*.yaml"):
        load_config(path)
