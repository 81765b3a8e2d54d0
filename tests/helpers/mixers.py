"""Small models of any mixer, in float64."""

import pytest
import torch

from titans_pt.config import ModelConfig
from titans_pt.layers.state import parts
from titans_pt.models import LanguageModel, build_model
from titans_pt.models.mixers import MIXERS

OWN = {
    "linear_attention": {"head_width": 8},
    "retnet": {"head_width": 8},
    "gla": {"n_heads": 4, "gate_rank": 5},
    "hgrn2": {"head_width": 8},
    "deltanet": {"head_width": 8},
    "gated_deltanet": {"n_heads": 4},
    "kda": {"head_width": 8},
    "gdn2": {"head_width": 8},
    "deltaproduct": {"n_heads": 4},
    "rwkv7": {"head_width": 8, "decay_rank": 5, "rate_rank": 5, "gate_rank": 5},
    "mamba": {"state": 4},
    "longhorn": {"state": 4},
    "mamba2": {"state": 6, "head_width": 16},
    "ttt_linear": {"head_width": 8, "mini_batch": 4},
    "ttt_mlp": {"head_width": 8, "mini_batch": 4, "base_lr": 1.0},
    "rmt": {"segment": 8, "memory_tokens": 3},
}
"""Settings with four heads for mixers that have settings; d_model is 32."""


def own_settings(mixers: list[str]) -> dict:
    """Model settings for small ``mixers``: their sections, and the d_model that these fit."""
    sections = {name: OWN[name] for name in mixers if name in OWN}
    return {"d_model": 32, **sections} if sections else {}


NAMES = MIXERS.built_in()
"""Every mixer of the package."""
BASELINES = sorted(OWN.keys() - {"rmt"})
"""Baselines that only replace the mixer; RMT wraps the whole model."""
FORMS = ("attention", "mac", "mal", "gated_deltanet", "mamba", "ttt_mlp", "hope", "rmt")
"""One mixer for each form of state."""
EVERY = [pytest.param(name, marks=() if name in FORMS else pytest.mark.thorough) for name in NAMES]
"""Every mixer, for tests that take seconds: the default suite runs one of each form of state."""


def small_config(mixers: list[str], **changes) -> ModelConfig:
    settings = dict(
        mixers=mixers, vocab_size=52, vocab_multiple=1, d_model=32, n_layers=2, n_heads=4, mlp_hidden=24, window=6,
        persistent_tokens=3, memory={"chunk_size": 4, "expansion": 2, "save_every": 2},
        mac={"segment": 8, "memory_tokens": 4},
    )  # fmt: skip
    return ModelConfig(**settings | {name: OWN[name] for name in mixers if name in OWN} | changes)


def small_model(mixers: list[str], **changes) -> LanguageModel:
    torch.manual_seed(0)
    model = build_model(small_config(mixers, **changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # move gates, decays and norms away from their symmetric start
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def form(state):
    """Classes and shapes of all parts of a state."""
    if isinstance(state, torch.Tensor):
        return tuple(state.shape)
    return type(state), [form(part) for _, part in parts(state)]
