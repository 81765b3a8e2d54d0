"""Sliding-window attention: the Transformer whose state has a constant size."""

from typing import Any

from titans_pt.config import Config, ModelConfig
from titans_pt.models.mixers.attention import AttentionMixer
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import WindowedAttention, check_window, fitting_attention


@MIXERS.register
class SlidingWindowMixer(WindowedAttention, AttentionMixer):
    """:class:`AttentionMixer` over the last ``model.window`` tokens, the token itself included, and the first ones of
    its document (model.attention.sinks)."""

    name = "swa"

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.window)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        return fitting_attention(config, length)

    @classmethod
    def check(cls, config: Config, need: Need):
        check_window(config, need)
