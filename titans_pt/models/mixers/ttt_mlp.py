"""TTT-MLP: a memory whose inner network is an MLP of two layers per head (Sun et al., arXiv 2407.04620)."""

from typing import Annotated

from pydantic import Field

from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.ttt import TTTMixer, TTTSettings


@MIXERS.register
class TTTMLP(TTTMixer):
    """:class:`TTTMixer` with f(x) = gelu(x W1 + b1) W2 + b2, four times as wide inside."""

    class Settings(TTTSettings):
        base_lr: Annotated[float, Field(gt=0.0)] = 0.1
        """Largest learning rate of the inner loop, before it is divided by head_width."""
        base_lr_warmup: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
        """Share of train.max_steps over which base_lr rises to its value, linearly, from a tenth of it."""

    name = "ttt_mlp"
    expansion = 4
