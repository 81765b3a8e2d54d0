"""MAC, memory as a context: attention sees recalled tokens before each segment, and its output is written back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, Positive
from titans_pt.kernels.attention import Prefix, masked_attention, segment_attention
from titans_pt.kernels.memory.state import choose, state_dtype
from titans_pt.layers.attention import Attention
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, linear_flops, mean_keys, product
from titans_pt.layers.gradients import with_gradients
from titans_pt.layers.memory import NeuralMemory, NeuralMemoryState, Projection
from titans_pt.layers.rotary import rotate
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import SHARED, counted_together, join_parts, take_parts
from titans_pt.models.mixers.base import MIXERS, Need
from titans_pt.models.mixers.common import (
    BranchGate,
    GateSettings,
    MemoryMixer,
    WindowedMemoryMixer,
    build_memory,
    check_attention,
    fitting_attention,
    persistent,
    used_length,
)
from titans_pt.models.mixers.segments import Piece, Segments


@dataclass
class MACState:
    """memory: state of the memory that segments are written to.
    read_weights: L tensors (B, H, d_in, d_out), the memory at the start of each row's segment.
    read_conv: (B, conv_width - 1, d_model), last inputs of the reading queries' convolution.
    k, v: (B, n, K, D), rotated keys and values of the newest n tokens, which are in unfinished segments.
    h_k, h_v: (B, m, H, D), the same for memory tokens; h_place: (m,) int64, the tokens that they belong to.
    offset: (B,) int64, tokens read of each row's segment. h_place and offset stay on the host.
    position, behind: tokens read in all, see titans_pt.layers.state.counted_together. Places count up to ``position``.
    persistent: keys and values of the persistent tokens, (B, P, K, D) each, from the weights that read so far; None
        without persistent tokens, or in an old state that did not keep them.
    """

    memory: NeuralMemoryState
    read_weights: tuple[Tensor, ...]
    read_conv: Tensor
    k: Tensor
    v: Tensor
    h_k: Tensor
    h_v: Tensor
    h_place: Tensor = field(metadata=SHARED)
    offset: Tensor
    position: int
    persistent: tuple[Tensor, Tensor] | None = None
    behind: Tensor | None = None

    @staticmethod
    def join_rows(states: "Sequence[MACState]", place: str) -> "MACState":
        """See titans_pt.layers.state.join_rows. Masks hide tokens and memory tokens that are not a row's own."""
        states = [state.at(counted) for state, counted in zip(states, counted_together(states), strict=True)]
        newest = max(state.k.shape[1] for state in states)
        places = sorted(set().union(*(state.h_place.tolist() for state in states)))
        return join_parts([state.with_room(newest, places) for state in states], place)

    def take_rows(self, index: Tensor) -> "MACState":
        """See titans_pt.layers.state.take_rows."""
        taken = take_parts(self, index)
        return taken.at(*counted_together([taken]))

    def at(self, counted: "MACState") -> "MACState":
        """The state with the count of tokens of ``counted``."""
        return replace(counted, h_place=self.h_place + (counted.position - self.position))

    def with_room(self, newest: int, places: list[int]) -> "MACState":
        """The state with zeros for other rows' tokens: the ``newest`` ones, and memory tokens at ``places``."""
        k, v = (torch.cat([x.new_zeros(len(x), newest - x.shape[1], *x.shape[2:]), x], 1) for x in (self.k, self.v))
        own = torch.tensor([places.index(place) for place in self.h_place.tolist()], dtype=torch.int64)
        h_k, h_v = (x.new_zeros(len(x), len(places), *x.shape[2:]).index_copy(1, own.to(x.device), x)
                    for x in (self.h_k, self.h_v))  # fmt: skip
        return replace(self, k=k, v=v, h_k=h_k, h_v=h_v, h_place=torch.tensor(places, dtype=torch.int64))


@dataclass
class MemoryTokens:
    """Memory tokens h: rotated keys and values (B, m, K, D), and the places of the m tokens that they belong to."""

    k: Tensor
    v: Tensor
    places: list[int]

    def followed_by(self, k: Tensor, v: Tensor, places: list[int]) -> "MemoryTokens":
        return MemoryTokens(torch.cat([self.k, k], 1), torch.cat([self.v, v], 1), self.places + places)

    def since(self, oldest: int) -> "MemoryTokens":
        """Memory tokens from the place ``oldest`` on."""
        past = sum(place < oldest for place in self.places)
        return MemoryTokens(self.k[:, past:], self.v[:, past:], self.places[past:])


class MACSettings(GateSettings):
    segment: Positive = 512
    """Tokens of a segment. If the default of 512 does not fit data.seq_len or model.memory.chunk_size, the default is
    half of data.seq_len, in whole chunks."""
    memory_tokens: Positive = 256
    """Memory tokens h that a segment attends to; segment / memory_tokens tokens share one. If the default of 256 does
    not divide ``segment``, the default is half of ``segment``."""
    write: Literal["residual", "attention"] = "residual"
    """Input of the memory's write. residual: the token plus a learned share of its attention. attention: the output of
    attention alone, as printed in the paper."""

    @model_validator(mode="after")
    def _check(self):
        if self.segment % self.memory_tokens:
            raise ValueError(f"memory_tokens: given {self.memory_tokens}; must divide segment={self.segment}")
        return self


@MIXERS.register
class MAC(MemoryMixer):
    """Memory as a context. In each segment h = M(q) with the memory of the END of the previous one; a = causal
    attention over [persistent | h | segment]; y = x + write * a is written and read; o = out(gate(x + a, M_t(y))).

    The paper has y = a and o = out(gate(a, M_t(a))): write=attention. The ``x +`` is ours ("residual connections
    throughout"). Attention starts as a mean over all tokens that it sees, which hardly tells tokens apart; without
    ``x +`` the memory could write only this mean. ``write`` is a learned vector that starts at 0, because attention's
    share of a token depends on the token's place. With that share a question's key is not the key that was written, and
    recall stays at 31 % for long (docs/notebook.md).

    Titans, Section 4.1, made causal. Token i sees h_j for j <= i only: h_j is read with the query of token j, and the
    paper's fully visible prefix would show token i the queries of tokens after it. M_t is each token's OWN memory, not
    the one of the segment's end. Each segment / memory_tokens tokens share one memory token, read with the query of the
    FIRST of them: every token sees the one of its own group.
    Queries, keys and values of the tokens are projected once; only h, y and the memory go segment by segment.
    """

    name = "mac"
    Settings = MACSettings
    shared = WindowedMemoryMixer.shared
    sharding = {
        "persistent": Shard.WHOLE,
        "write": Shard.WHOLE,
        "read": Shard.ENTER,
        "attention.q": Shard.ENTER, "attention.k": Shard.ENTER, "attention.v": Shard.ENTER,  # called one by one
        "join": Shard.GATHER,
        "gate.norm_a": Shard.SPLIT,  # of x + attention, which is whole
        "gate.norm_b": Shard.NORM_OF_ALL_HEADS,
        "gate.linear": Shard.ENTER_COLUMN,
        "out": Shard.LAST_ROW,
    }  # fmt: skip
    memory: NeuralMemory
    compiles_documents = False  # segments end where documents do: each batch would be compiled again

    def __init__(self, config: ModelConfig):
        super().__init__()
        settings = self.settings(config)
        self.segment, self.stride = settings.segment, settings.segment // settings.memory_tokens
        self.compiled = False
        """Whether whole segments go through torch.compile if the block around them does not."""
        self.persistent = persistent(config)
        self.read = Projection(config.d_model, config.memory_heads, config.conv_width, unit=True)
        self.attention = Attention(config)
        memory = build_memory(config)
        if not isinstance(memory, NeuralMemory):
            raise ValueError("memory.hierarchy: given one; must be None for mac")
        self.memory = memory
        self.write = nn.Parameter(torch.zeros(config.d_model)) if settings.write == "residual" else None
        self.join = nn.Flatten(-2)  # (B, T, H, D) -> (B, T, d_model)
        self.gate = BranchGate(config, settings)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    @classmethod
    def defaults(cls, config: ModelConfig, length: int | None = None) -> dict[str, Any]:
        found = super().defaults(config, length) | fitting_attention(config)
        given, fields = cls._given(config), cls.Settings.model_fields
        chunk = found.get("model.memory.chunk_size", config.memory.chunk_size)
        usual = fields["segment"].default
        segment = given.get("segment", usual)
        if "segment" not in given and (usual % chunk or usual > (length or usual)):
            most = max(chunk, min(usual, (length or usual) // 2))  # two segments: the memory is read
            segment = found["model.mac.segment"] = most - most % chunk
        if isinstance(segment, int) and segment > 0 and segment % fields["memory_tokens"].default:
            found["model.mac.memory_tokens"] = segment // 2 if segment % 2 == 0 else segment
        return found

    @classmethod
    def check(cls, config: Config, need: Need):
        check_attention(config, need, any_width=False)
        super().check(config, need)
        need(
            config.model.memory.hierarchy is None,
            "model.memory.hierarchy",
            "set",
            "must be null for mac, whose segments write and read one memory by turns: use lmm, mag or mal",
        )
        own, length, chunk = cls.settings(config.model), used_length(config), config.model.memory.chunk_size
        need(
            own.segment % chunk == 0,
            "model.mac.segment",
            own.segment,
            f"must be a multiple of model.memory.chunk_size={chunk}",
        )
        need(
            own.segment <= length,
            "model.mac.segment",
            own.segment,
            f"at most data.seq_len={length}; with a longer one the memory is never read",
        )

    def set_compiled(self, on: bool):
        self.compiled = on

    @property
    def piece(self) -> int:
        return max(self.segment, super().piece)

    def kept_state_bytes(self, length: int) -> int:
        piece = min(length, self.segment)  # the memory is called segment by segment
        return self.memory.kept_state_bytes(piece) * -(-length // piece)

    def flops(self, length: int) -> Flops:
        """A memory token per ``stride`` tokens is read, projected, and seen by the tokens from its own place on."""
        d, prefix = self.out.in_features, 0 if self.persistent is None else len(self.persistent)
        whole = min(length, self.segment)
        seen = mean_keys(whole, None) + (whole / self.stride + 1) / 2 + prefix
        reading = product(d, d) + (1 / self.stride) * (
            linear_flops(self.attention.k) + linear_flops(self.attention.v) + self.memory.read_flops()
        )
        return self.memory.flops(length) + self.attention.flops(seen) + reading + self.gate.flops() + product(d, d)

    def forward(
        self, x: Tensor, state: MACState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MACState]:
        attention, length = self.attention, x.shape[1]
        base, behind = (state.position, state.behind) if state else (0, None)
        # state as a keyword: tensor ranks sum the gradients of positional arguments
        queries, read_conv = self.read(x, state=state and state.read_conv, documents=documents)
        plain = attention.queries(x)
        turn = attention.rotation_from(base, plain, behind)
        k, v = attention.keys_values(x)
        q, k = rotate(plain, *turn), rotate(k, *turn)
        prefix = self._prefix(k, state)
        learned, norm = self.memory.network()
        initial = self.memory.first_weights(learned, len(x), state_dtype(x))
        if state:
            if not self.fits(state):
                raise ValueError(f"state: given one of another MAC, {state.offset.max()} tokens into a segment; here "
                                 f"segment={self.segment}, memory_tokens={self.segment // self.stride}")  # fmt: skip
            found, own = ([tuple(keys.shape[2:]), *(tuple(w.shape[1:]) for w in weights)]
                          for keys, weights in ((state.k, state.read_weights), (k, initial)))  # fmt: skip
            if found != own:
                raise ValueError(f"state: given one of another MAC, with keys and memory weights {found}; here {own} "
                                 "(n_heads, depth, expansion)")  # fmt: skip
            memory, read_weights, offset = state.memory, state.read_weights, state.offset.tolist()
            h = MemoryTokens(state.h_k.to(k.dtype), state.h_v.to(v.dtype), state.h_place.tolist())
            k, v = (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        else:
            memory, read_weights, offset = None, initial, [0] * len(x)
            h = MemoryTokens(k[:, :0], v[:, :0], [])
        first = base + length - k.shape[1]  # place of the oldest token in k, v

        segments, outputs = Segments(self.segment, self.stride, base, length, offset, documents), []
        for piece, *own, own_k, own_v in _cut(list(segments.pieces()), x, q, plain, k[:, -length:], v[:, -length:]):
            recall, write = self._steps(segments.whole(piece))
            current = self.memory.end_weights(memory) if memory else initial
            read_weights = choose(piece.new_segment, choose(piece.new_document, initial, current), read_weights)
            if piece.groups:
                chosen = segments.selection(piece.groups, x.device)
                new_k, new_v = recall(
                    self, queries[:, chosen], [part[..., chosen, :, :] for part in turn], read_weights, norm
                )
                h = h.followed_by(new_k, new_v, piece.groups)
            h = h.since(piece.oldest)
            if piece.oldest < base + piece.begin:  # the segment began before the piece
                seen = slice(piece.oldest - first, base + piece.end - first)
                own_k, own_v = k[:, seen], v[:, seen]
            keys, values = torch.cat([h.k, own_k], 1), torch.cat([h.v, own_v], 1)
            mask = segments.mask(piece, h.places, x.device)
            here = documents.cut(piece.begin, piece.end) if documents and any(piece.new_document) else None
            o, memory = write(self, *own, keys, values, mask, prefix, memory, here)
            outputs.append(o)

        assert memory is not None, "no token is in no piece"
        oldest = base + length - max(segments.offset)
        h, kept = h.since(oldest), slice(oldest - first, None)
        after = MACState(
            memory, read_weights, read_conv, k[:, kept], v[:, kept], h.k, h.v,
            torch.tensor(h.places, dtype=torch.int64), torch.tensor(segments.offset), base + length, prefix, behind,
        )  # fmt: skip
        # A piece in which no group of tokens begins reads no memory token.
        return with_gradients(self.out(torch.cat(outputs, 1)), queries), after

    def fits(self, state: MACState) -> bool:
        """Whether the segments of ``state`` are no longer than here, and it has the memory tokens of this MAC."""
        begun, places, now = state.offset.tolist(), state.h_place.tolist(), state.position
        own = {place for tokens in set(begun) for place in range(now - tokens, now, self.stride)}
        return max(begun) < self.segment and own.issubset(places)

    def _prefix(self, keys: Tensor, state: MACState | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the persistent tokens, (B, P, K, D) each, in the dtype of the segment's ``keys``; None
        without persistent tokens."""
        if state and state.persistent is not None:
            k, v = state.persistent
            return k.to(keys.dtype), v.to(keys.dtype)
        if self.persistent is None:
            return None
        k, v = self.attention.keys_values(self.persistent[None])
        return k.expand(len(keys), -1, -1, -1), v.expand(len(keys), -1, -1, -1)

    def _steps(self, whole: bool) -> tuple[Callable, Callable]:
        """:meth:`_recall` and :meth:`_write`, called with ``self``, for a piece that is a whole segment or a part."""
        steps = MAC._recall, MAC._write
        # Whole segments all have one shape; the parts that a stream or a document cuts off have any length.
        if self.compiled and whole and not torch.compiler.is_compiling():
            from titans_pt.kernels import compiling  # its import takes more than a second

            return compiling.compiled(steps[0]), compiling.compiled(steps[1])
        return steps

    def _recall(self, queries: Tensor, turn: list[Tensor], weights, norm) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, (B, m, K, D), of the memory tokens read with queries (B, m, H, D)."""
        k, v = self.attention.keys_values(self.join(self.memory.read(queries, weights, norm)))
        return rotate(k, *turn), v

    def _write(self, x, q, plain, keys, values, mask, prefix, memory, documents) -> tuple[Tensor, NeuralMemoryState]:
        """A piece's attention, its write to the memory, and each token's read: outputs (B, t, d_model), the memory."""
        attended = self._attend(q, plain, keys, values, mask, prefix)
        if self.write is None:
            written = joined = attended
        else:
            written, joined = x + self.write * attended, x + attended
        m, memory = self.memory(written, memory, documents)
        return self.gate(x, joined, m), memory

    def _attend(self, q, plain, keys, values, mask, prefix) -> Tensor:
        """A piece's attention over [persistent | h | segment], (B, t, d_model).

        keys, values: of memory tokens, then of tokens. mask: which of them each token sees; None for a piece that
        starts its segment, and for one token that sees all.
        """
        always = prefix and Prefix(plain, *prefix)
        if mask is None and q.shape[1] > 1:
            cut = [keys.shape[1] - q.shape[1], q.shape[1]]
            (h_k, k), (h_v, v) = keys.split(cut, 1), values.split(cut, 1)
            return self.join(segment_attention(q, k, v, h_k, h_v, self.stride, prefix=always))
        return self.join(masked_attention(q, keys, values, mask, always))


def _cut(pieces: list[Piece], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each piece and its tokens of every tensor (B, T, ...)."""
    sizes = [piece.end - piece.begin for piece in pieces]
    # One split: separate slices would each fill a tensor of the whole length in the backward pass.
    return zip(pieces, *(y.split(sizes, 1) for y in tensors), strict=True)
