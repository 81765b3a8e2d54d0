"""MAC's bookkeeping in plain numbers: ends of segments, the memory tokens of each, and the tokens that each token sees.

All of it is decided on the host. The numbers are known before the computation starts: nothing waits for a GPU.
A place is a token's number in its row's whole stream; an index is its number in the current call.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.common import sent
from titans_pt.layers.documents import Documents


@dataclass
class Piece:
    """Tokens with the indices begin .. end - 1, in which every row has one segment.

    new_segment, new_document: for each row, whether one starts at ``begin``.
    segment_start: for each row, the place of its segment's first token.
    groups: the places, ascending, at which a group of tokens that share one memory token starts in any row.
    """

    begin: int
    end: int
    new_segment: list[bool]
    new_document: list[bool]
    segment_start: list[int]
    groups: list[int]

    @property
    def oldest(self) -> int:
        """The place of the first token that any row of the piece sees."""
        return min(self.segment_start)


class Segments:
    """The pieces of one call.

    Args:
        segment, stride: tokens of a segment, and of a group that shares one memory token.
        base: place of the call's first token. length: tokens of the call.
        offset: for each row, the tokens of its unfinished segment read before the call; :meth:`pieces` updates them.
        documents: where documents start inside the call.
    """

    def __init__(
        self, segment: int, stride: int, base: int, length: int, offset: list[int], documents: Documents | None
    ):
        self.segment, self.stride, self.base, self.length, self.offset = segment, stride, base, length, offset
        self._starts = None if documents is None else documents.host

    def pieces(self) -> Iterator[Piece]:
        """Cuts the call wherever a segment starts in ANY row."""
        cuts = [self.length]
        if self._starts is not None:
            cuts = [*self._starts.any(0).nonzero().flatten().tolist(), self.length]
        begin = 0
        while begin < self.length:
            new = [False] * len(self.offset) if self._starts is None else self._starts[:, begin].tolist()
            offset = [0 if document else tokens for document, tokens in zip(new, self.offset, strict=True)]
            end = min(begin + self.segment - max(offset), next(cut for cut in cuts if cut > begin))
            start = [self.base + begin - tokens for tokens in offset]
            yield Piece(begin, end, [tokens == 0 for tokens in offset], new, start, self._groups(begin, end, start))
            self.offset = [(tokens + end - begin) % self.segment for tokens in offset]
            begin = end

    def whole(self, piece: Piece) -> bool:
        """Whether the piece is a whole segment in every row: all such pieces have the same shape."""
        return piece.end - piece.begin == self.segment

    def _groups(self, begin: int, end: int, segment_start: list[int]) -> list[int]:
        begin, end = self.base + begin, self.base + end
        found = [range(begin + (start - begin) % self.stride, end, self.stride) for start in set(segment_start)]
        return list(found[0]) if len(found) == 1 else sorted(set().union(*found))

    def selection(self, places: list[int], device: torch.device) -> slice | Tensor:
        """Index of the call's tokens at ``places``: a slice if they are evenly spaced, which copies nothing."""
        even = self._even([place - self.base for place in places])
        if even:
            return slice(even.start, even.stop, even.step)
        return sent(torch.tensor([place - self.base for place in places]), device)

    def mask(self, piece: Piece, memory_places: list[int], device: torch.device) -> Tensor | None:
        """Mask of memory tokens (at ``memory_places``), then of tokens from ``piece.oldest`` on, that the piece's
        tokens see.

        Returns:
            bool (B or 1, t, m + n); None for one token that sees all that is kept, and for a piece that starts its
            segment in all rows, for which segment_attention needs none.
        """
        # If only some rows of a state were taken, it still holds memory tokens of the others, whose groups differ.
        own = len(set(piece.segment_start)) == 1 and all(
            (place - piece.segment_start[0]) % self.stride == 0 for place in memory_places
        )
        one = piece.end - piece.begin == 1 and own
        if one or all(piece.new_segment):
            return None
        # Made from numbers if all rows have the same place, as usual: copying from the host would wait for the GPU.
        start: int | Tensor = piece.segment_start[0]
        if len(set(piece.segment_start)) > 1:
            start = sent(torch.tensor(piece.segment_start), device)[:, None, None]
        even = self._even(memory_places)
        if even:
            memory = torch.arange(even.start, even.stop, even.step, device=device)
        else:
            memory = sent(torch.tensor(memory_places, dtype=torch.int64), device)
        query = torch.arange(self.base + piece.begin, self.base + piece.end, device=device)[None, :, None]
        key = torch.arange(piece.oldest, self.base + piece.end, device=device)
        tokens = (key <= query) & (key >= start)
        memory_tokens = (memory <= query) & (memory >= start) & ((memory - start) % self.stride == 0)
        return torch.cat([memory_tokens, tokens], -1)

    def _even(self, places: list[int]) -> range | None:
        """The places as a range if they are ``stride`` apart; None if they are not, or if there are none."""
        even = range(places[0], places[-1] + 1, self.stride) if places else None
        return even if even and places == list(even) else None
