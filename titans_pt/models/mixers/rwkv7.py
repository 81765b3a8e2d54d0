"""RWKV-7 "Goose": its time mixing (Peng et al., arXiv 2503.14456)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, product
from titans_pt.layers.recurrence import RecurrentState, precise
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.base import MIXERS, Mixer
from titans_pt.models.mixers.recurrent import HeadWidthMixer, linear

FASTEST = -math.exp(-0.5)
"""Log decay of a token that forgets most: 55 % remain."""


class HeadNorm(nn.Module):
    """A LayerNorm per head with a weight and a bias per channel: (..., H, V) -> the same. The paper's GroupNorm."""

    sharding = {"": Shard.COLUMN}
    no_decay = ("weight", "bias")

    def __init__(self, n_heads: int, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n_heads, width))
        self.bias = nn.Parameter(torch.zeros(n_heads, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight + self.bias


@MIXERS.register
class RWKV7(HeadWidthMixer):
    """S <- (diag(w) - (a * kappa) kappa^T) S + k v^T: it erases at kappa, of unit length, not at the key k.

    Every input is a learned mean of the token and the one before it. w = exp(-exp(-1/2) sigmoid(.)), the rate
    a = sigmoid(.) and the gate come from low-rank layers. kappa reads S before the decay. A token is therefore two
    sub-steps of the linear memory: the first reads at kappa / w after the decay and erases along a * kappa, the second
    writes k. The output is out(gate * (LayerNorm per head of S^T r + (r * r_k)^T k v)); r is not scaled.

    The paper mixes the first layer's values into the values of all other layers. A mixer sees only its own block: here
    every layer works as the paper's first one.
    """

    name = "rwkv7"
    delta, erases, decay = True, True, "channel"
    no_decay = ("mix", "bonus")

    class Settings(Section):
        head_width: Positive = 64
        """Width of a head's queries, keys and values, for model.d_model / head_width heads. The default is lowered
        until it divides model.d_model."""
        decay_rank: Positive | None = None
        """Width between the two matrices that make the decay. Null: 2.5 sqrt(model.d_model) head_width / 64, rounded to
        a multiple of 32, 32 at least."""
        rate_rank: Positive | None = None
        """Width between the two matrices that make the rate of erasing. Null: by the formula of decay_rank."""
        gate_rank: Positive | None = None
        """Width between the two matrices that make the output gate. Null: 5 sqrt(model.d_model), rounded as for
        decay_rank."""

    sharding = {
        "": Shard.ENTER,
        "mix": Shard.SUMMED,
        "r": Shard.COLUMN,
        "k": Shard.COLUMN,
        "v": Shard.COLUMN,
        "decay_in": Shard.SUMMED,
        "decay_out": Shard.COLUMN,
        "rate_in": Shard.SUMMED,
        "rate_out": Shard.COLUMN,
        "gate_in": Shard.SUMMED,
        "gate_out": Shard.COLUMN,
        "erased": Shard.COLUMN,
        "slowed": Shard.COLUMN,
        "bonus": Shard.COLUMN,
        "out": Shard.LAST_ROW,
    }

    def __init__(self, config: ModelConfig):
        d, own = config.d_model, self.settings(config)
        super().__init__(config, own.head_width, own.head_width)

        def rank(given: int | None, usual: float) -> int:
            return given or max(32, 32 * round(usual * d**0.5 / 32))

        factor = own.head_width / 64
        decay, rate, gate = (
            rank(own.decay_rank, 2.5 * factor),
            rank(own.rate_rank, 2.5 * factor),
            rank(own.gate_rank, 5),
        )
        self.mix = nn.Parameter(torch.zeros(6, d))
        self.r, self.k, self.v = (linear(d, d) for _ in "rkv")
        self.decay_in, self.decay_out = linear(d, decay), linear(decay, d, bias=True)
        self.rate_in, self.rate_out = linear(d, rate), linear(rate, d, bias=True)
        self.gate_in, self.gate_out = linear(d, gate), linear(gate, d)
        self.erased, self.slowed = (nn.Parameter(torch.zeros(d)) for _ in range(2))  # the paper's xi and alpha
        self.bonus = nn.Parameter(torch.full((self.n_heads, self.key_width), -0.04))  # r_k
        self.norm = HeadNorm(self.n_heads, self.value_width, eps=config.norm_eps * own.head_width)
        self.out = linear(d, d)
        self._place, self._layers = 0, 1

    def bind(self, mixers: list[Mixer]):
        """Note the layer's place: initial values differ between layers."""
        self._place, self._layers = next(n for n, mixer in enumerate(mixers) if mixer is self), len(mixers)

    @torch.no_grad()
    def own_initialisation(self):
        """Initialises as the authors' code does (RWKV-LM, RWKV-v7): biases and token means that vary with channel and
        layer, small keys, low-rank layers that begin at their biases, and an output of 0."""
        d, width = self.out.in_features, self.key_width
        depth, rest = self._place / max(1, self._layers - 1), 1 - self._place / self._layers
        channel = torch.arange(d)
        along = channel / max(1, d - 1)
        zigzag = (channel % width) / max(1, width - 1) * 2 - 1
        zigzag = zigzag * zigzag.abs()
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])  # r, decay, k, v, rate, gate
        self.mix.copy_(1 - (channel / d) ** (powers[:, None] * rest))
        self.decay_out.bias.copy_(-5.5 + 6 * along ** (1 + depth**0.3) + 2.5 * zigzag)
        self.rate_out.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (along - 0.5))
        self.erased.copy_(0.71 - 0.1 * (along - 0.5))
        self.slowed.fill_(1.02)
        self.norm.weight.fill_(((self._place + 1) / self._layers) ** 0.7)
        for layer, size in ((self.r, 0.5), (self.k, 0.05), (self.v, 0.5)):
            layer.weight.uniform_(-size * d**-0.5, size * d**-0.5)
        for first, second in (("decay_in", "decay_out"), ("rate_in", "rate_out"), ("gate_in", "gate_out")):
            getattr(self, first).weight.zero_()
            nn.init.orthogonal_(getattr(self, second).weight, 0.1)
        self.out.weight.zero_()

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, RecurrentState]:
        before = x.new_zeros(len(x), 1, x.shape[-1])
        if state is not None:
            before = state.of_inputs(before.shape)[0].to(x.dtype)
        shifted = torch.cat([before, x[:, :-1]], 1)
        if documents is not None:
            shifted = shifted.masked_fill(documents.starts.unsqueeze(-1), 0.0)
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.lerp(x, shifted, share) for share in self.mix.to(x.dtype))

        r, v, key = self.split(self.r(x_r)), self.split(self.v(x_v)), self.k(x_k)
        decay = FASTEST * torch.sigmoid(precise(self.split(self.decay_out(torch.tanh(self.decay_in(x_w))))))
        rate = torch.sigmoid(self.rate_out(self.rate_in(x_a)))
        kappa = F.normalize(self.split(precise(key * self.erased)), dim=-1)
        k, rate = self.split(key * (1 + (rate - 1) * self.slowed)), self.split(rate)

        nothing = torch.zeros_like(kappa)
        y, memory = self.remember(
            r, _twice(kappa.to(x.dtype) * rate, k), _twice(torch.zeros_like(v), v), decay, None, state, documents,
            erase=_twice(kappa * torch.exp(-decay), nothing),
        )  # fmt: skip
        y = self.norm(y) + (r * k * self.bonus).sum(-1, keepdim=True) * v
        gate = self.gate_out(torch.sigmoid(self.gate_in(x_g)))
        return self.out(y.flatten(-2) * gate), RecurrentState(memory, (x[:, -1:],))

    def flops(self, length: int) -> Flops:
        """Its linear layers, the read before erasing, the erasing, the write, and the read."""
        return linear_flops(self) + self.n_heads * 4 * product(self.key_width, self.value_width)


def _twice(first: Tensor, second: Tensor) -> Tensor:
    """Interleave two tensors (B, T, H, W) token by token: (B, 2 T, H, W)."""
    return torch.stack([first, second], 2).flatten(1, 2)
