"""TTT-MLP: a memory whose inner network is an MLP of two layers per head (Sun et al., arXiv 2407.04620)."""

from typing import Annotated

from pydantic import Field

from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.ttt import TTTMixer, TTTSettings


@MIXERS.register
class TTTMLP(TTTMixer):
    """:class:`TTTMixer` with f(x) = gelu(x W1 + b1) W2 + b2, four times as wide inside.

    The authors let base_lr rise from 0.01 over the first tenth of the training; here it is constant.
    """

    class Settings(TTTSettings):
        base_lr: Annotated[float, Field(gt=0.0)] = 0.1
        """Largest learning rate of the inner loop, before it is divided by head_width."""

    name = "ttt_mlp"
    expansion = 4
