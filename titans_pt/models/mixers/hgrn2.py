"""HGRN2: a gated linear RNN whose keys are the shares that it forgets (Qin et al., arXiv 2404.07904)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.recurrence import RecurrentState, precise
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS, Mixer
from titans_pt.models.mixers.recurrent import HeadWidthMixer, linear


class LowerBounds(nn.Module):
    """Lower bounds of the share that each layer keeps, (d, L) in [0, 1): 0 in the first layer, more in each later one.

    They are the cumulative sum of softmax(logits) over the L layers, less its first entry. The whole model has one
    such parameter. Channels come first, because tensor ranks cut the first dimension. It is a module for code that
    shards parameters by module.
    """

    sharding = {"": Shard.COLUMN}
    no_decay = ("logits",)

    def __init__(self, channels: int, layers: int):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(channels, layers))

    def forward(self) -> Tensor:
        share = precise(self.logits).softmax(1)
        return share.cumsum(1) - share[:, :1]


@MIXERS.register
class HGRN2(HeadWidthMixer):
    """f = l + (1 - l) sigmoid(W x) per channel; decay log f, k = 1 - f, q = silu(W x) K^-1/2; an RMSNorm over d_model.

    l is the layer's column of :class:`LowerBounds`, which the model's first HGRN2 layer owns and all share.
    """

    name = "hgrn2"
    decay = "channel"

    class Settings(Section):
        head_width: Positive = 128
        """Width of a head's queries, keys and values, for model.d_model / head_width heads. The default is lowered
        until it divides model.d_model."""

    sharding = {
        "": Shard.ENTER,
        "q": Shard.COLUMN,
        "f": Shard.COLUMN,
        "v": Shard.COLUMN,
        "norm": Shard.NORM_OF_ALL_HEADS,
        "out": Shard.LAST_ROW,
    }

    def __init__(self, config: ModelConfig):
        d, width = config.d_model, self.settings(config).head_width
        super().__init__(config, width, width)
        self.q, self.f, self.v = (linear(d, d) for _ in "qfv")
        self.norm = RMSNorm(d, eps=config.norm_eps)
        self.out = linear(d, d)

    def bind(self, mixers: list[Mixer]):
        peers = [mixer for mixer in mixers if isinstance(mixer, HGRN2)]
        if peers[0] is self:
            self.bounds = LowerBounds(self.q.out_features, len(peers))
        self._bounds = (peers[0].bounds,)
        # A tensor, not a number: torch.compile takes numbers as constants, and would compile each layer separately.
        self._layer = torch.tensor([peers.index(self)], device="cpu")

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        (bounds,) = self._bounds
        lowest = bounds().index_select(1, self._layer.to(x.device, non_blocking=True)).squeeze(1)
        f = lowest + (1 - lowest) * torch.sigmoid(precise(self.f(x)))
        f = f.clamp(min=torch.finfo(f.dtype).tiny)  # the logarithm of 0 would be infinite
        q, v = F.silu(self.q(x)) * self.key_width**-0.5, self.v(x)
        q, k, v, decay = map(self.split, (q, (1 - f).to(x.dtype), v, f.log()))
        y, memory = self.remember(q, k, v, decay, None, state, documents)
        return self.out(self.norm(y.flatten(-2))), RecurrentState(memory)
