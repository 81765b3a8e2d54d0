"""A window of tokens whose gradients each token writes, as ATLAS' Omega rule does (arXiv 2505.23735, Eq. 9).

With a window of w earlier tokens, token t's gradient is u_t = sum_{i=t-w..t} g_i^(t) u_i, where g^(t) are its shares.
In the linear recurrence of chunked.py this changes only the coefficients: the diagonal matrix of theta becomes a band
matrix, P diag(theta) -> P band(theta g). Its first w columns belong to the tokens before the block. The record of these
tokens holds keys, values and own gates; their gradients are taken again at the weights of the current chunk (Eq. 16).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.blocks import Blocks, Layout
from titans_pt.kernels.common import sent
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Rule

Recent = tuple[Tensor, ...]
"""Record of the newest w tokens, oldest first, (..., w, .) each: whether there is one (1 or 0), k, v and own gates."""


def no_tokens(rule: Rule, network: NetworkShape, like: Tensor) -> Recent:
    """Empty record where a document begins; like: (B, H, .)."""
    widths = (1, network.width, network.width, *[1] * len(rule.gates))
    return tuple(like.new_zeros(*like.shape[:2], rule.window - 1, width) for width in widths)


def followed(recent: Recent, new: list[Tensor], valid: Tensor | None) -> Recent:
    """Record of the newest w tokens after c more.

    new: (N, c, .) each. valid: (N, c), whether a place holds a token; None: all do.
    """
    w, c = recent[0].shape[1], new[0].shape[1]
    there = new[0].new_ones(*new[0].shape[:2], 1) if valid is None else valid.unsqueeze(-1).to(new[0].dtype)
    joined = (torch.cat([old, x], 1) for old, x in zip(recent, (there, *new), strict=True))
    if valid is None:
        return tuple(x[:, c:] for x in joined)
    index = (valid.sum(-1, keepdim=True) + torch.arange(w, device=valid.device)).unsqueeze(-1)
    return tuple(x.take_along_dim(index, 1) for x in joined)


def band(shares: Tensor, there: Tensor) -> Tensor:
    """Share of each gradient in each token's sum, (N, c, w + c). The columns begin with the w tokens before the block.

    shares: (N, c, w + 1), the token's own first. there: (N, w, 1), whether the tokens before the block exist.
    """
    c, w = shares.shape[-2], shares.shape[-1] - 1
    rows = F.pad(shares.flip(-1), (0, c)).flatten(-2)[..., : c * (w + c)]  # each row one place further right
    found = rows.unflatten(-1, (c, w + c))
    return torch.cat([found[..., :w] * there.mT, found[..., w:]], -1)


class Wide:
    """Blocks that are cut alike in every row, with the keys of the w tokens before each block.

    recent: :data:`Recent` before the first token, (B, H, w, .) each. tokens: k, v and own gates, (B, T, H, .) each.
    gone: per block, whether its window excludes all tokens before it.
    """

    def __init__(self, recent: Recent, tokens: list[Tensor], blocks: Blocks, gone: list[bool]):
        self.w = recent[0].shape[2]
        there, *kept = (x.transpose(1, 2) for x in recent)
        self.joined = [torch.cat([old, x], 1) for old, x in zip(kept, tokens, strict=True)]
        self.there = torch.cat([there, there.new_ones(*tokens[0].shape[:3], 1)], 1)
        starts = torch.tensor([0, *blocks.lengths]).cumsum(0)[:-1]
        self.starts = sent(starts, there.device)
        first = torch.where(torch.tensor(gone), starts, -self.w).cummax(0).values
        self.first = sent(first, there.device)

    def of(self, layout: Layout) -> tuple[list[Tensor], Tensor]:
        """k, v and own gates of a run's n blocks, (n, N, w + c, .) each, and whether the first w tokens exist,
        (n, N, w, 1)."""
        tokens = layout.tokens
        part = slice(tokens.start, tokens.stop + self.w)  # token t is at index w + t
        c = (tokens.stop - tokens.start) // layout.count

        def fold(x: Tensor) -> Tensor:
            windows = x[:, part].unfold(1, self.w + c, c)  # (B, n, H, ., w + c)
            return windows.permute(1, 0, 2, 4, 3).flatten(1, 2)

        place = self.starts[layout.span, None] + torch.arange(-self.w, 0, device=self.first.device)
        seen = place >= self.first[layout.span, None]
        return [fold(x) for x in self.joined], fold(self.there)[..., : self.w, :] * seen[:, None, :, None]

    def left(self) -> Recent:
        """:data:`Recent` after the last token."""
        length = self.there.shape[1] - self.w
        place = torch.arange(length - self.w, length, device=self.first.device)
        there = self.there[:, -self.w :] * (place >= self.first[-1])[:, None, None]
        return tuple(x.transpose(1, 2) for x in (there, *(x[:, -self.w :] for x in self.joined)))
