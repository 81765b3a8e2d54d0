"""Cuts each row of a batch into compute blocks that respect its own chunk and document boundaries."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.common import sent

Flag = bool | Tensor
"""Answer for all rows, or for each row, bool (B,)."""


@dataclass(frozen=True)
class Blocks:
    """Compute blocks of every row. A block lies inside one document and one gradient chunk.

    lengths: tokens of each block; the padded length c if rows differ.
    index, valid: (B, N, c), the token of each slot and whether the slot holds one; None if all rows have the same cuts.
    new_chunk, new_document, ends_chunk: per block; a bool when every row agrees.
    """

    lengths: list[int]
    index: Tensor | None
    valid: Tensor | None
    new_chunk: list[Flag]
    new_document: list[Flag]
    offset: Tensor
    ends_chunk: list[Flag]


def cut(offset: Tensor, reset: Tensor | None, length: int, chunk: int, block: int) -> Blocks:
    """Cut ``length`` tokens of each row; offset (B,), reset None or (B, T) bool. Blocks.offset (B,) is the one after.

    Reads ``offset`` and ``reset`` on the host: the layout must be known before the computation starts.
    """
    starts = offset.tolist()
    if reset is None:
        by_start = {o: _cut_row(o, [], length, chunk, block) for o in sorted(set(starts))}
        cuts = [by_start[o] for o in starts]
    else:
        places = [row.nonzero().flatten().tolist() for row in reset.cpu()]
        cuts = [_cut_row(o, p, length, chunk, block) for o, p in zip(starts, places, strict=True)]
    rows, ends = zip(*cuts, strict=True)
    after = torch.tensor(ends, dtype=torch.int64, device=offset.device)
    if all(row == rows[0] for row in rows):
        _, lengths, chunks, documents, ended = map(list, zip(*rows[0], strict=True))
        return Blocks(lengths, None, None, chunks, documents, after, ended)

    count = max(len(row) for row in rows)
    empty = (0, 0, False, False, False)
    padded = [list(row) + [empty] * (count - len(row)) for row in rows]
    table = torch.tensor(padded, dtype=torch.int64)  # (B, N, 5)
    width = int(table[..., 1].max())
    place = torch.arange(width)
    valid = place < table[..., 1:2]
    index = torch.where(valid, table[..., :1] + place, 0)
    chunks, documents, ended = (_agree(table[..., n].bool()) for n in (2, 3, 4))
    return Blocks([width] * count, index, valid, chunks, documents, after, ended)


def _cut_row(
    offset: int, resets: list[int], length: int, chunk: int, block: int
) -> tuple[list[tuple[int, int, bool, bool, bool]], int]:
    """Return [(start, tokens, starts a chunk, starts a document, ends a chunk)] and the offset after the row."""
    pieces, t, pending = [], 0, [*resets, length]
    while t < length:
        document = pending[0] == t
        if document:
            pending.pop(0)
            offset = 0
        size = min(block, chunk - offset, pending[0] - t)
        begins, offset = offset == 0, (offset + size) % chunk
        pieces.append((t, size, begins, document, offset == 0))
        t += size
    return pieces, offset


def _agree(flags: Tensor) -> list[Flag]:
    """(B, N) -> per block a bool where all rows agree, else the column."""
    every, some = flags.all(0).tolist(), flags.any(0).tolist()
    return [flags[:, n] if some[n] and not every[n] else every[n] for n in range(flags.shape[1])]


def runs(blocks: Blocks) -> Iterator[tuple[int, int, slice]]:
    """Yield (first block, one past the last, token range) for each run of equally long blocks."""
    first = t = 0
    while first < len(blocks.lengths):
        last = first + 1
        while last < len(blocks.lengths) and blocks.lengths[last] == blocks.lengths[first]:
            last += 1
        end = t + blocks.lengths[first] * (last - first)
        yield first, last, slice(t, end)
        first, t = last, end


def join(outputs: list[Tensor], blocks: Blocks, length: int) -> Tensor:
    """Join the outputs of all runs: (B, n c, H, D) each -> (B, T, H, D)."""
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    if blocks.index is None or blocks.valid is None:
        return out
    return in_order(out, blocks.index, blocks.valid, length)


def in_order(x: Tensor, index: Tensor, valid: Tensor, length: int) -> Tensor:
    """Slots (B, N c, H, F) -> their tokens in order, (B, T, H, F). index, valid: see :class:`Blocks`."""
    index, valid = index.flatten(1), valid.flatten(1)
    place = torch.zeros(len(index), length, dtype=torch.int64)
    row, slot = valid.nonzero(as_tuple=True)
    place[row, index[row, slot]] = slot
    return torch.take_along_dim(x, sent(place, x.device)[:, :, None, None], 1)


class Layout:
    """Conversion between (B, T, H, F) and the blocks of a run, (n, B H, c, F)."""

    def __init__(self, blocks: Blocks, first: int, last: int, tokens: slice, heads: int):
        self.blocks, self.span, self.tokens, self.heads = blocks, slice(first, last), tokens, heads
        self.count = last - first

    def fold(self, x: Tensor) -> Tensor:
        if self.blocks.index is None:
            x = x[:, self.tokens].unflatten(1, (self.count, -1))
        else:
            index = sent(self.blocks.index[:, self.span], x.device)
            x = torch.take_along_dim(x, index.flatten(1)[:, :, None, None], 1).unflatten(1, index.shape[1:])
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """(n, B H, c, D) -> (B, n c, H, D)."""
        return x.unflatten(1, (-1, self.heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def valid(self, device) -> Tensor | None:
        """(n, B H, c) bool, or None if every slot holds a token."""
        if self.blocks.valid is None:
            return None
        return sent(self.blocks.valid[:, self.span], device).transpose(0, 1).repeat_interleave(self.heads, 1)

    def rows(self, flags: list[Flag], device) -> list[Flag]:
        """Per block of the run, flags of batch rows -> flags of (batch, head) rows."""
        return [f if isinstance(f, bool) else sent(f, device).repeat_interleave(self.heads) for f in flags[self.span]]
