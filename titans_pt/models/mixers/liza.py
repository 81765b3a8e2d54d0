"""LiZA: a delta rule that reads a pretrained attention layer's own projections, mixed with its output (TPTT)."""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Section
from titans_pt.layers.attention import Attention, AttentionState
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, attention_flops, linear_flops
from titans_pt.layers.recurrence import RecurrentState, unit_length, varying
from titans_pt.layers.sharding import Shard
from titans_pt.models.mixers.attention import AttentionMixer
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import WindowedAttention, check_window, fitting_attention
from titans_pt.models.mixers.recurrent import LinearMemoryMixer


class LiZASettings(Section):
    mix: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of the delta rule in the output; 1 - mix is attention's. It is not learned."""
    mix_warmup: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Share of train.max_steps over which mix rises from 0 to its value, linearly. 0: it is constant."""
    cross_gate: bool = False
    """Add the product of the two weighted outputs to their sum."""


@dataclass
class LiZAState:
    """memory: the delta rule's matrix, and the two newest keys as they were projected, (B, 2, K D)."""

    attention: AttentionState
    memory: RecurrentState


@MIXERS.register
class LiZA(WindowedAttention, LinearMemoryMixer):
    """(1 - mix) out(window_attention(x)) + mix out(RMSNorm(delta_rule(x))), a baseline for ``titans convert``.

    LiZA with MaG of TPTT (arXiv 2506.17671), of order 1, without forgetting. It has no parameter beyond attention's:
    the delta rule takes the queries, keys and values from before RoPE, shared keys and values repeated. Head by head,

        q = silu(q) / |silu(q)|,  k = silu(k) / |silu(k)|,  v = v / sqrt(D)
        beta = sigmoid(mean of this and the two earlier raw keys), a rate per key channel
        S <- S + (beta * k) (v - S^T k)^T
        o = S^T q

    The norm is over all heads and has no weight. TPTT's released operator (0.12.1) is no delta rule: within a chunk its
    writes are not summed, and beta counts twice. This is the rule that the paper states.
    """

    name = "liza"
    Settings = LiZASettings
    shared = AttentionMixer.shared
    delta = erases = True
    sharding = {"": Shard.ENTER, "norm": Shard.NORM_OF_ALL_HEADS, "out": Shard.LAST_ROW}

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.head_width, config.head_width)
        settings = self.settings(config)
        self.largest_mix, self.warmup, self.cross_gate = settings.mix, settings.mix_warmup, settings.cross_gate
        self.mix = varying(self.largest_mix)
        self.attention = Attention(config, config.window)
        self.norm = nn.RMSNorm(self.attention.width, eps=1e-6, elementwise_affine=False)
        self.out = nn.Linear(self.attention.width, config.d_model, bias=False)

    @classmethod
    def heads(cls, config: ModelConfig) -> tuple[str, int]:
        return "model.n_heads", config.n_heads

    @classmethod
    def split_sizes(cls, config: ModelConfig) -> dict[str, int]:
        return super(LinearMemoryMixer, cls).split_sizes(config)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None):
        return fitting_attention(config, length)

    @classmethod
    def check(cls, config: Config, need: Need):
        check_window(config, need)

    def set_progress(self, done: float):
        self.mix = varying(self.largest_mix * (min(1.0, done / self.warmup) if self.warmup else 1.0))

    def forward(
        self, x: Tensor, state: LiZAState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, LiZAState]:
        q, (k, v) = self.attention.queries(x), self.attention.keys_values(x)
        a, attention = self.attention.attend(q, k, v, state.attention if state else None, documents)
        y, memory = self._delta_rule(q, k, v, state.memory if state else None, documents)
        base, added = (1 - self.mix) * self.out(a), self.mix * self.out(self.norm(y.flatten(-2)))
        mixed = base + added
        return (mixed + base * added if self.cross_gate else mixed), LiZAState(attention, memory)

    def _delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, state: RecurrentState | None, documents: Documents | None
    ) -> tuple[Tensor, RecurrentState]:
        """Queries (B, T, H, D), keys and values (B, T, K, D), as projected -> (B, T, H, D), and the next state."""
        mean, newest = recent_mean(k.flatten(-2), state.inputs[0] if state else None, documents)
        beta = torch.sigmoid(mean.view_as(k))
        q, k = unit_length(F.silu(q)), unit_length(F.silu(k))
        written, erased, v = (self._repeated(y) for y in (beta * k, k, v * self.value_width**-0.5))
        y, memory = self.remember(q, written, v, None, None, state, documents, erased)
        return y, RecurrentState(memory, (newest,))

    def _repeated(self, x: Tensor) -> Tensor:
        """(B, T, K, D) -> (B, T, H, D): one head for every head of the queries."""
        return x.repeat_interleave(self.attention.n_heads // self.attention.kv_heads, 2)

    def flops(self, length: int) -> Flops:
        """``out`` is used twice."""
        attended = attention_flops(self.attention.width, self.attention.seen(length))
        return super().flops(length) + attended + linear_flops(self.out)


def recent_mean(x: Tensor, past: Tensor | None, documents: Documents | None) -> tuple[Tensor, Tensor]:
    """Mean of each token of x (B, T, C) and the two before it; a document's first token stands for those before it.

    Args:
        past: what the previous piece returned; None at the start.

    Returns:
        (B, T, C), and the two tokens (B, 2, C) that the next piece takes for those before it.
    """
    whole = torch.cat([x[:, :1].expand(-1, 2, -1) if past is None else past.to(x.dtype), x], 1)
    before, earlier = whole[:, 1:-1], whole[:, :-2]
    if documents is not None:
        place = torch.arange(x.shape[1], device=x.device)
        age = torch.where(documents.begin < 0, 2, place - documents.begin).unsqueeze(-1)
        before = torch.where(age >= 1, before, x)
        earlier = torch.where(age >= 2, earlier, before)
    return (x + before + earlier) / 3, torch.stack([before[:, -1], x[:, -1]], 1)
