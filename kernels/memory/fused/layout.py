"""Table of the tokens that form each block, made on the device without reading anything back."""

import torch
from torch import Tensor


def count(length: int, chunk: int, block: int, offset: bool, resets: int) -> int:
    """Largest number of blocks in a row of ``length`` tokens. offset: whether rows may begin inside a chunk."""
    if block > chunk:  # a partial chunk at an end or a beginning is a separate block
        return resets + -(-length // block) + offset + (offset or resets > 0 or length % chunk > 0)
    return resets + ((length + block - 2) // block + 1 if offset else -(-length // block))


def table(length: int, chunk: int, block: int, blocks: int, offset: Tensor, reset: Tensor | None) -> Tensor:
    """Table of blocks, (B, blocks, 5) int32.

    Columns: start, number of tokens, index of the block at which the chunk began (-1: before this call), whether a
    document begins, number of blocks with tokens in the row from this one on.
    offset: (B,), tokens already read of the current chunk. reset: bool (B, T) or None.

    Blocks lie on a grid of ``block`` tokens that starts with the chunk; one of the two lengths divides the other. A
    block of several chunks holds whole chunks, except a document's last one. The rest of a chunk at the row's beginning
    is a separate block. The part of a chunk that the row's end cuts off is another one, because the next call must know
    the weights there. Rows with fewer blocks end in empty blocks.
    """
    t = torch.arange(length, device=offset.device)
    position = t + offset[:, None]
    if reset is not None:
        since = torch.where(reset, t, -1).cummax(1).values
        position = torch.where(since < 0, position, t - since)
    if block > chunk:
        grid = position + (offset // -chunk * chunk)[:, None]  # from the first whole chunk on
        if reset is not None:
            grid = torch.where(since < 0, grid, position)
        begins = (grid >= 0) & (grid % block == 0)
        begins |= t == length - (position[:, -1:] + 1) % chunk
    else:
        begins = position % block == 0
    begins[:, 0] = True
    index = torch.where(begins, begins.cumsum(1) - 1, blocks)
    # One-dimensional: along one of two dimensions a deterministic scatter copies from the host, which no CUDA graph can
    # hold.
    row = (blocks + 1) * torch.arange(len(offset), device=t.device)[:, None]
    start = t.new_full((row.numel() * (blocks + 1),), length)
    start = start.scatter_(0, (row + index).flatten(), t.repeat(row.numel())).view(-1, blocks + 1)
    start[:, -1] = length
    tokens = start.diff(dim=1)
    start = start[:, :-1]
    place = start.clamp(max=length - 1)
    number = torch.arange(blocks, device=offset.device)
    new_chunk = (tokens > 0) & ((position % chunk).gather(1, place) == 0)
    frozen = torch.where(new_chunk, number, -1).cummax(1).values
    document = torch.zeros_like(new_chunk) if reset is None else reset.gather(1, place) & new_chunk
    left = (tokens > 0).sum(1, keepdim=True) - number
    return torch.stack([start, tokens, frozen, document, left.clamp(min=0)], -1).to(torch.int32)
