"""Sequence mixers by name: ``forward(x, state=None, documents=None) -> (y, state)``, x and y (B, T, d_model)."""

from torch import nn

from titans_pt.config import ModelConfig
from titans_pt.models.mixers.attention import AttentionMixer
from titans_pt.models.mixers.lmm import LMM
from titans_pt.models.mixers.mac import MAC
from titans_pt.models.mixers.mag import MAG
from titans_pt.models.mixers.mal import MAL

BUILDERS = {
    "lmm": LMM,
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "attention": lambda config: AttentionMixer(config, window=None),
    "swa": lambda config: AttentionMixer(config, window=config.window),
}


def build_mixer(name: str, config: ModelConfig) -> nn.Module:
    """The mixer called ``name`` (one of titans_pt.config.MIXERS)."""
    return BUILDERS[name](config)
