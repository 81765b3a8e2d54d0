"""Recurrent Memory Transformer (Bulatov et al., arXiv 2207.06881): attention inside segments, memory tokens between."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Positive, Section
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, mean_keys, product
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.state import check_rows, fork, join_parts, map_tensors, rows
from titans_pt.models.mixers.attention import AttentionMixer
from titans_pt.models.mixers.base import MIXERS, Blocks, Mixer, Need
from titans_pt.models.mixers.common import used_length


@dataclass
class RMTState:
    """memory: (B, M, d_model), the memory tokens that the current segment began with.
    blocks: each block's state inside the segment; None before its first token.
    read: tokens read of the segment.
    """

    memory: Tensor
    blocks: list[Any] | None
    read: int

    @staticmethod
    def join_rows(states: "Sequence[RMTState | RMTRows]", place: str) -> "RMTState | RMTRows":
        """See titans_pt.layers.state.join_rows."""
        together = len({state.read if isinstance(state, RMTState) else None for state in states}) == 1
        if together and isinstance(states[0], RMTState):
            return join_parts(states, place)
        return RMTRows([fork(row) for state in states for row in _rows(state, rows(state) or 0)])


@dataclass
class RMTRows:
    """State of each row by itself: documents have cut the rows, or states in other places of a segment were joined."""

    rows: list[RMTState]

    def take_rows(self, index: Tensor) -> "RMTRows":
        """See titans_pt.layers.state.take_rows."""
        return RMTRows([fork(self.rows[row]) for row in index.tolist()])

    join_rows = staticmethod(RMTState.join_rows)


def _rows(state: RMTState | RMTRows | None, rows: int) -> Sequence[RMTState | None]:
    """The state of each row by itself."""
    if isinstance(state, RMTRows):
        return state.rows
    if state is None:
        return [None] * rows
    return [map_tensors(state, itemgetter(slice(row, row + 1))) for row in range(rows)]


class FirstMemory(nn.Module):
    """The memory tokens (M, d_model) that a sequence begins with, as large as the scaled embeddings. They are a module
    for code that shards parameters by module.

    Args:
        std: standard deviation of the embeddings' weights. scale: factor on the embeddings.
    """

    def __init__(self, tokens: int, width: int, std: float, scale: float):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(tokens, width) * std * scale)

    def forward(self, rows: int) -> Tensor:
        return self.tokens.repeat(rows, 1, 1)


@MIXERS.register
class RMT(AttentionMixer):
    """A Transformer that reads [memory | segment | memory], causal, segment by segment; positions begin again.

    It wraps the model: the last block's outputs at the last memory tokens, normalised, are both memories of the next
    segment. Gradients flow back through all segments of a sample. To learn longer memories, continue from a checkpoint
    with more segments (data.seq_len), as the authors do. The first block's mixer owns the norm and the memory that a
    sequence begins with. (The authors use GPT-2's last norm; here the norm has its own weights.)
    """

    name = "rmt"
    sharding = None

    class Settings(Section):
        segment: Positive = 512
        """Tokens of a segment. If data.seq_len is at most 512, the default is half of it instead of 512."""
        memory_tokens: Positive = 16
        """Tokens that carry the memory from one segment to the next; the same number is read and written."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        settings = self.settings(config)
        self.segment, self.memory_tokens, self.hidden = settings.segment, settings.memory_tokens, config.hidden
        self.width, self.std, self.scale, self.eps = (
            config.d_model, config.init_std, config.embedding_factor, config.norm_eps
        )  # fmt: skip

    def bind(self, mixers: list[Mixer]):
        if mixers[0] is self:
            self.first = FirstMemory(self.memory_tokens, self.width, self.std, self.scale)
            self.norm = RMSNorm(self.width, eps=self.eps)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        found, segment = super().defaults(config, length), cls.Settings.model_fields["segment"].default
        if length is not None and segment >= length > 1:
            found["model.rmt.segment"] = length // 2
        return found

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        own, length = cls.settings(config.model), used_length(config)
        need(config.model.kinds == [cls.name], "model.mixers", config.model.mixers, f"[{cls.name}] stands alone")
        need(
            own.segment < length,
            f"model.{cls.name}.segment",
            own.segment,
            f"below data.seq_len={length}; in a single segment the memory is never read",
        )

    def around(
        self, blocks: Blocks, x: Tensor, state: RMTState | RMTRows | None, documents: Documents | None
    ) -> tuple[Tensor, RMTState | RMTRows]:
        check_rows(len(state.rows) if isinstance(state, RMTRows) else rows(state), x)
        if documents is None and not isinstance(state, RMTRows):
            return self._segments(blocks, x, state)
        # Segments end at different tokens in different rows: rows are read one by one.
        starts = torch.zeros(x.shape[:2], dtype=torch.bool) if documents is None else documents.host
        outputs, after = [], []
        with torch.compiler.set_stance("force_eager"):  # pieces of any length: each would be compiled
            for row, before in enumerate(_rows(state, len(x))):
                cuts = sorted({0, *starts[row].nonzero().flatten().tolist()})
                for begin, end in zip(cuts, [*cuts[1:], x.shape[1]], strict=True):
                    before = None if starts[row, begin] else before
                    y, before = self._segments(blocks, x[row : row + 1, begin:end], before)
                    outputs.append(y)
                assert before is not None, "a row has a token"
                after.append(before)
        return torch.cat(outputs, 1).view_as(x), RMTRows(after)

    def _segments(self, blocks: Blocks, x: Tensor, state: RMTState | None) -> tuple[Tensor, RMTState]:
        """Run rows whose segments end at the same tokens."""
        state = state or RMTState(self.first(len(x)), None, 0)
        memory, inner, read, outputs = state.memory.to(x.dtype), state.blocks, state.read, []
        for piece in self._pieces(x, read):
            before, after = read == 0, read + piece.shape[1] == self.segment
            given = torch.cat([*([memory] if before else []), piece, *([memory] if after else [])], 1)
            y, inner = blocks(given, inner, None)
            first = self.memory_tokens if before else 0
            outputs.append(y[:, first : first + piece.shape[1]])
            read += piece.shape[1]
            if after:
                memory, inner, read = self.norm(y[:, -self.memory_tokens :]), None, 0
        return torch.cat(outputs, 1), RMTState(memory, inner, read)

    def _pieces(self, x: Tensor, read: int) -> list[Tensor]:
        """x, cut where segments end."""
        first = min(self.segment - read, x.shape[1])
        return [x[:, :first], *x[:, first:].split(self.segment, 1)] if first < x.shape[1] else [x]

    @property
    def piece(self) -> int:
        return self.segment

    def flops(self, length: int) -> Flops:
        """Memory tokens pass the blocks twice per segment, the MLP included, whose own count has only other tokens."""
        d, whole = self.width, min(length, self.segment)
        more = 2 * self.memory_tokens / whole if length >= self.segment else self.memory_tokens / whole
        keys = mean_keys(round(whole * (1 + more)), self.segment + 2 * self.memory_tokens)
        return (1 + more) * (self.attention.flops(keys) + linear_flops(self.out)) + more * 3 * product(d, self.hidden)
