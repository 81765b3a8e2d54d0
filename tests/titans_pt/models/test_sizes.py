"""The configs of the paper's sizes: parameters of each model within one percent of its name, and the recipe."""

from pathlib import Path

import pytest
import torch

from titans_pt.config_file import load_config
from titans_pt.models import build_model

CONFIGS = Path(__file__).parents[3] / "configs"
MODELS = ("lmm", "mac", "mag", "mal", "transformer")
PARAMETERS = {
    "170m": (170_743_728, 170_918_832, 170_872_752, 170_752_944, 169_691_904),
    "340m": (341_053_056, 341_618_304, 339_922_560, 337_931_904, 341_099_520),
    "760m": (762_548_928, 763_691_712, 763_507_392, 762_585_792, 757_016_064),
}
RECIPE = {"170m": (3e-3, 15e9), "340m": (1.5e-3, 15e9), "760m": (1.25e-3, 30e9)}


@pytest.mark.parametrize("size", PARAMETERS)
@pytest.mark.parametrize("model", MODELS)
def test_parameter_count(size, model):
    config = load_config(CONFIGS / size / f"{model}.yaml")
    with torch.device("meta"):
        count = sum(p.numel() for p in build_model(config.model).parameters())
    assert count == PARAMETERS[size][MODELS.index(model)]
    assert abs(count / (int(size[:-1]) * 1e6) - 1) < 0.01

    lr, tokens = RECIPE[size]
    assert config.train.lr == lr
    assert abs(config.train.max_steps * config.train.batch_tokens / tokens - 1) < 1e-3
    assert (config.train.batch_tokens, config.data.seq_len, config.train.clip) == (2**19, 4096, 1.0)
    assert config.model.pattern == ["attention" if model == "transformer" else model] * config.model.n_layers


def test_every_config_is_valid():
    for path in CONFIGS.rglob("*.yaml"):
        load_config(path)
