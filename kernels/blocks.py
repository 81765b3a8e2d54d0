"""Cuts each row of a batch into compute blocks that respect its own chunk and document boundaries."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Compute blocks of every row. A block lies inside one document, and inside one gradient chunk or on whole ones.

    lengths: tokens of each block, when the cuts are the same in every row (index and valid are None then).
    index, valid: (B, N, c), the token of each place and whether there is one, when rows differ.
    new_chunk, new_document: per block; a bool when every row agrees, else a bool tensor (B,).
    """

    lengths: list[int]
    index: Tensor | None
    valid: Tensor | None
    new_chunk: list
    new_document: list
    offset: Tensor


def cut(offset: Tensor, reset: Tensor | None, length: int, chunk: int, block: int) -> Blocks:
    """offset (B,), reset None or (B, T) bool -> the blocks, and the offset (B,) after ``length`` tokens.

    A block of more tokens than ``chunk`` takes as many whole chunks as it can hold.

    Reads ``offset`` and ``reset`` on the host: the layout is data, known before the computation starts.
    """
    starts = offset.tolist()
    if reset is None:
        rows, ends = zip(*(_cut_row(o, [], length, chunk, block) for o in sorted(set(starts))), strict=True)
        table = dict(zip(sorted(set(starts)), zip(rows, ends, strict=True), strict=True))
        rows, ends = zip(*(table[o] for o in starts), strict=True)
    else:
        places = [row.nonzero().flatten().tolist() for row in reset.cpu()]
        rows, ends = zip(
            *(_cut_row(o, p, length, chunk, block) for o, p in zip(starts, places, strict=True)), strict=True
        )
    after = torch.tensor(ends, dtype=torch.int64, device=offset.device)
    if all(row == rows[0] for row in rows):
        _, lengths, chunks, documents = zip(*rows[0], strict=True)
        return Blocks(list(lengths), None, None, list(chunks), list(documents), after)

    count = max(len(row) for row in rows)
    empty = (0, 0, False, False)
    padded = [list(row) + [empty] * (count - len(row)) for row in rows]
    table = torch.tensor(padded, dtype=torch.int64)  # (B, N, 4)
    width = int(table[..., 1].max())
    place = torch.arange(width)
    valid = place < table[..., 1:2]
    index = torch.where(valid, table[..., :1] + place, 0)
    return Blocks([width] * count, index, valid, _agree(table[..., 2].bool()), _agree(table[..., 3].bool()), after)


def _cut_row(offset: int, resets: list[int], length: int, chunk: int, block: int):
    """[(start, tokens, starts a chunk, starts a document)], offset after the row."""
    pieces, t, pending = [], 0, [*resets, length]
    while t < length:
        document = pending[0] == t
        if document:
            pending.pop(0)
            offset = 0
        size = min(block, chunk - offset, pending[0] - t)
        if offset == 0:
            size = max(size, min(block, pending[0] - t) // chunk * chunk)
        pieces.append((t, size, offset == 0, document))
        t += size
        offset = (offset + size) % chunk
    return pieces, offset


def _agree(flags: Tensor) -> list:
    """(B, N) -> per block a bool where all rows agree, else the column."""
    every, some = flags.all(0).tolist(), flags.any(0).tolist()
    return [flags[:, n] if some[n] and not every[n] else every[n] for n in range(flags.shape[1])]
