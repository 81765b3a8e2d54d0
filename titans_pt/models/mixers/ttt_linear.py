"""TTT-Linear: a memory whose inner network is one linear layer per head (Sun et al., arXiv 2407.04620)."""

from titans_pt.models.mixers.base import MIXERS
from titans_pt.models.mixers.ttt import TTTMixer


@MIXERS.register
class TTTLinear(TTTMixer):
    """:class:`TTTMixer` with f(x) = x W + b."""

    name = "ttt_linear"
