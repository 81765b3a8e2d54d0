"""The loss of an untrained model is a uniform guess's loss, ln V."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.mixers import NAMES, small_config
from titans_pt.models import build_model


def first_loss(mixer: str, **changes) -> tuple[float, float]:
    """Return (mean loss on random tokens, ln V) for an untrained model of width 256."""
    torch.manual_seed(0)
    config = small_config([mixer], **{"d_model": 256, "n_layers": 1, "vocab_size": 2048} | changes)
    model, ids = build_model(config), torch.randint(0, 2048, (8, 65))
    with torch.no_grad():
        logits, _ = model(ids[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())), math.log(2048)


@pytest.mark.parametrize("mixer", NAMES)
def test_the_first_loss_is_that_of_a_uniform_guess(mixer):
    """init_std * d_model is 12.8 here, and 15.4 in a model of width 768. Before the norm started smaller, the loss was
    10 to 13 instead of 7.6."""
    loss, uniform = first_loss(mixer, init_std=0.05)
    assert loss == pytest.approx(uniform, abs=0.12)


def test_small_models_and_untied_heads_begin_as_they_did():
    for changes in ({"d_model": 192}, {"init_std": 0.05, "tie_embeddings": False}):
        model = build_model(small_config(["lmm"], **changes))
        assert torch.equal(model.norm.weight, torch.ones_like(model.norm.weight))
