"""MAC: what the memory knows of the past stands before each segment as context; the segment's outcome is written."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.kernels.attention import Prefix, masked_attention, segment_attention
from titans_pt.kernels.memory.state import choose, state_dtype
from titans_pt.layers.attention import Attention
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import NeuralMemoryState, Projection
from titans_pt.layers.rotary import rotate
from titans_pt.models.mixers.common import BranchGate, build_memory, persistent


@dataclass
class MACState:
    """memory: state of the memory that segments are written to.
    read_weights: L tensors (B, H, d_in, d_out), the memory at the start of each row's segment.
    read_conv: (B, conv_width - 1, d_model), last inputs of the reading queries' convolution.
    k, v: (B, n, H, D), rotated keys and values of the newest n tokens, those of unfinished segments.
    h_k, h_v: (B, m, H, D), the same for memory tokens; h_place: (m,) int64, the tokens that they belong to.
    offset: (B,) int64, tokens read of each row's segment. h_place and offset stay on the host.
    position: tokens read in all.
    """

    memory: NeuralMemoryState
    read_weights: tuple[Tensor, ...]
    read_conv: Tensor
    k: Tensor
    v: Tensor
    h_k: Tensor
    h_v: Tensor
    h_place: Tensor
    offset: Tensor
    position: int


class MAC(nn.Module):
    """For each segment: h = M(q) with the memory of the END of the previous segment; a = attention, causal, over
    [persistent | h | segment]; y = x + write * a is written and read; o = out(gate(x + a, M_t(y))).

    The paper has y = a. The ``x +`` is ours ("residual connections throughout"): attention starts as a mean over all
    it sees, and without it that mean, in which tokens can hardly be told apart, is all there is to write. ``write`` is
    a learned vector that starts at 0: what attention adds to a token depends on where it stands, so a key that is
    asked for is not the key that was written, and recall stays at 31 % for long (docs/notebook.md).

    Titans, Section 4.1, made causal. Token i sees h_j for j <= i only: h_j is read with the query of token j, and the
    paper's fully visible prefix would show token i the queries of tokens after it. M_t is each token's OWN memory, not
    the one of the segment's end. One memory token for every segment / memory_tokens tokens, read with the query of
    the FIRST of them, so that every token sees the one of its own group.
    Queries, keys and values of the tokens are projected once; only h, y and the memory go segment by segment.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.segment, self.stride = config.segment, config.segment // config.memory_tokens
        self.compiled = False
        """Whether whole segments go through torch.compile where the block around them does not."""
        self.persistent = persistent(config)
        self.read = Projection(config.d_model, config.memory_heads, config.conv_width, unit=True)
        self.attention = Attention(config.d_model, config.n_heads, config.rope_base)
        self.memory = build_memory(config)
        self.write = nn.Parameter(torch.zeros(config.d_model))
        self.join = nn.Flatten(-2)  # (B, T, H, D) -> (B, T, d_model)
        self.gate = BranchGate(config)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, state: MACState | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, MACState]:
        attention = self.attention
        batch, length = x.shape[:2]
        base = state.position if state else 0
        position = torch.arange(base, base + length, device=x.device)
        queries, read_conv = self.read(x, state and state.read_conv, documents)
        plain = attention.heads(attention.q(x))
        q = rotate(plain, position, attention.rope_base)
        k, v = attention.keys_values(x)
        k = rotate(k, position, attention.rope_base)
        persistent = None
        if self.persistent is not None:
            persistent = [p.expand(batch, -1, -1, -1) for p in attention.keys_values(self.persistent[None])]
        initial, norm = self.memory.network()
        initial = tuple(w.to(state_dtype(x)).expand(batch, *w.shape) for w in initial)
        # Who sees what is decided on the host, with plain numbers: they are known before the computation starts.
        if state:
            memory, read_weights, carried = state.memory, state.read_weights, state.offset.tolist()
            h_k, h_v, h_place = state.h_k.to(k.dtype), state.h_v.to(v.dtype), state.h_place.tolist()
            k, v = (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        else:
            memory, read_weights, carried = None, initial, [0] * batch
            h_k, h_v, h_place = k[:, :0], v[:, :0], []
        first = base + length - k.shape[1]  # place of the oldest token in k, v

        outputs = []
        for begin, end, starts, new_document, offset in self._pieces(carried, documents, length):
            current = memory.memory.weights if memory else initial
            read_weights = _choose(starts, _choose(new_document, initial, current), read_weights)
            recall, write = MAC._recall, MAC._write
            # Whole segments are all of one shape; what a stream or a document cuts off has any.
            if self.compiled and end - begin == self.segment and not torch.compiler.is_compiling():
                recall, write = _compiled(recall), _compiled(write)
            segment_start = [base + begin - tokens for tokens in offset]  # place of each row's segment's first token
            oldest = min(segment_start)

            new = self._groups(base + begin, base + end, segment_start)
            if new:
                index = self._index([place - base for place in new], x.device)
                new_k, new_v = recall(self, queries[:, index], position[index], read_weights, norm)
                h_k, h_v, h_place = torch.cat([h_k, new_k], 1), torch.cat([h_v, new_v], 1), h_place + new
            past = sum(place < oldest for place in h_place)
            h_k, h_v, h_place = h_k[:, past:], h_v[:, past:], h_place[past:]

            tokens = slice(oldest - first, base + end - first)
            mask = None  # of a piece that is the start of a segment in all rows: segment_attention knows who sees what
            if any(offset):
                seen = range(oldest, base + end)
                mask = self._mask(range(base + begin, base + end), seen, h_place, segment_start, x.device)
            keys, values = torch.cat([h_k, k[:, tokens]], 1), torch.cat([h_v, v[:, tokens]], 1)
            piece, here = slice(begin, end), documents.cut(begin, end) if any(new_document) else None
            o, memory = write(
                self, x[:, piece], q[:, piece], plain[:, piece], keys, values, mask, persistent, memory, here
            )
            outputs.append(o)

        offset = [(tokens + end - begin) % self.segment for tokens in offset]
        oldest = base + length - max(offset)
        past, keep = sum(place < oldest for place in h_place), oldest - first
        state = MACState(
            memory, read_weights, read_conv, k[:, keep:], v[:, keep:], h_k[:, past:], h_v[:, past:],
            torch.tensor(h_place[past:], dtype=torch.int64), torch.tensor(offset), base + length,
        )  # fmt: skip
        return self.out(torch.cat(outputs, 1)), state

    def _groups(self, begin: int, end: int, segment_start: list[int]) -> list[int]:
        """Places in begin .. end - 1 at which a group of ``stride`` tokens starts in any row, ascending."""
        starts = set(segment_start)
        found = [range(begin + (start - begin) % self.stride, end, self.stride) for start in starts]
        return list(found[0]) if len(found) == 1 else sorted(set().union(*found))

    def _index(self, places: list[int], device: torch.device) -> slice | Tensor:
        """What selects these places: a slice wherever they are evenly spaced, which nothing has to be copied for."""
        even = self._even(places)
        return slice(even.start, even.stop, even.step) if even else torch.tensor(places, device=device)

    def _even(self, places: list[int]) -> range | None:
        """The places as a range where they are ``stride`` apart; None where they are not, or none."""
        even = range(places[0], places[-1] + 1, self.stride) if places else None
        return even if even and places == list(even) else None

    def _recall(self, queries: Tensor, position: Tensor, weights, norm) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, (B, m, H, D), of the memory tokens read with queries (B, m, H, D)."""
        k, v = self.attention.keys_values(self.join(self.memory.read(queries, weights, norm)))
        return rotate(k, position, self.attention.rope_base), v

    def _write(
        self, x, q, plain, keys, values, mask, persistent, memory, documents
    ) -> tuple[Tensor, NeuralMemoryState]:
        """A piece's attention, written to the memory and read by each token: outputs (B, t, d_model), the memory.

        keys, values: of memory tokens, then of tokens. mask: who sees which of them; None for a piece that starts its
        segment.
        """
        prefix = persistent and Prefix(plain, *persistent)
        if mask is None:
            cut = [keys.shape[1] - q.shape[1], q.shape[1]]
            (h_k, k), (h_v, v) = keys.split(cut, 1), values.split(cut, 1)
            attended = segment_attention(q, k, v, h_k, h_v, self.stride, prefix=prefix)
        else:
            attended = masked_attention(q, keys, values, mask, prefix)
        attended = self.join(attended)
        m, memory = self.memory(x + self.write * attended, memory, documents)
        return self.gate(x, x + attended, m), memory

    def _pieces(self, offset: list[int], documents: Documents | None, length: int):
        """Cuts the call wherever a segment starts in ANY row: then every row has one segment in a piece.

        Yields begin, end, and for each row: does a segment, does a document start at begin, and the offset there.
        """
        starts = None if documents is None else documents.starts.cpu()
        cuts = [length] if starts is None else [*starts.any(0).nonzero().flatten().tolist(), length]
        begin = 0
        while begin < length:
            new = [False] * len(offset) if starts is None else starts[:, begin].tolist()
            offset = [0 if document else tokens for document, tokens in zip(new, offset, strict=True)]
            segments = [tokens == 0 for tokens in offset]
            end = min(begin + self.segment - max(offset), next(cut for cut in cuts if cut > begin))
            yield begin, end, segments, new, offset
            offset = [(tokens + end - begin) % self.segment for tokens in offset]
            begin = end

    def _mask(
        self, query: range, key: range, h_key: list[int], segment_start: list[int], device: torch.device
    ) -> Tensor:
        """Places of T queries, S tokens and M memory tokens, segment_start (B,) -> bool (B or 1, T, M + S).

        From numbers, in the usual case that all rows stand alike: a copy from the host would wait for the GPU.
        """
        start: int | Tensor = segment_start[0]
        if len(set(segment_start)) > 1:
            start = torch.tensor(segment_start, device=device)[:, None, None]
        even = self._even(h_key)
        if even:
            h_key = torch.arange(even.start, even.stop, even.step, device=device)
        else:
            h_key = torch.tensor(h_key, dtype=torch.int64, device=device)
        query = torch.arange(query.start, query.stop, device=device)[None, :, None]
        key = torch.arange(key.start, key.stop, device=device)
        tokens = (key <= query) & (key >= start)
        memory_tokens = (h_key <= query) & (h_key >= start) & ((h_key - start) % self.stride == 0)
        return torch.cat([memory_tokens, tokens], -1)


@functools.cache
def _compiled(step: Callable) -> Callable:
    """A segment's step, fused: as it is, it is a storm of small launches. Without CUDA graphs: those keep one segment's
    results, training needs them all."""
    return torch.compile(step, dynamic=False)


def _choose(rows: list[bool], yes: tuple[Tensor, ...], no: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """rows: B; tensors (B, H, d_in, d_out). No copy where all rows agree."""
    if all(rows):
        return yes
    if not any(rows):
        return no
    return choose(torch.tensor(rows, device=yes[0].device), yes, no)
