"""A window of tokens whose gradients each token writes, as ATLAS' Omega rule does (arXiv 2505.23735, Eq. 9).

With w tokens before it, token t's gradient is u_t = sum_{i=t-w..t} g_i^(t) u_i, where g^(t) are its shares. Of the
linear recurrence of chunked.py that changes the coefficients alone: the gates' diagonal of theta becomes a band,
P diag(theta) -> P band(theta g), whose first w columns belong to the tokens before the block. These have keys, values
and own gates, at which the gradient is taken again with the weights of today's chunk (borders truncate and refresh), or
the factors X, G of the gradient that they had (carry).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.blocks import Blocks, Layout
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Rule

Recent = tuple[Tensor, ...]
"""Record of the newest w tokens, oldest first, (..., w, .) each: whether there is one (1 or 0), then k, v and own
gates, or X of each layer and G of each layer."""


def no_tokens(rule: Rule, network: NetworkShape, like: Tensor) -> Recent:
    """Empty record where a document begins; like: (B, H, .)."""
    if rule.border == "carry":
        widths = [d_in for d_in, _ in network.layers] + [d_out for _, d_out in network.layers]
    else:
        widths = [network.width, network.width, *[1] * len(rule.gates)]
    return tuple(like.new_zeros(*like.shape[:2], rule.window - 1, width) for width in (1, *widths))


def followed(recent: Recent, new: list[Tensor], valid: Tensor | None) -> Recent:
    """The newest w tokens after c more, new (N, c, .) each, of which ``valid`` (N, c) are tokens; None: all."""
    w, c = recent[0].shape[1], new[0].shape[1]
    there = new[0].new_ones(*new[0].shape[:2], 1) if valid is None else valid.unsqueeze(-1).to(new[0].dtype)
    joined = (torch.cat([old, x], 1) for old, x in zip(recent, (there, *new), strict=True))
    if valid is None:
        return tuple(x[:, c:] for x in joined)
    index = (valid.sum(-1, keepdim=True) + torch.arange(w, device=valid.device)).unsqueeze(-1)
    return tuple(x.take_along_dim(index, 1) for x in joined)


def band(shares: Tensor, there: Tensor) -> Tensor:
    """shares (N, c, w + 1), the token's own first; there (N, w, 1) -> (N, c, w + c): what of each gradient, those of
    the w tokens before the block first, is in each token's."""
    c, w = shares.shape[-2], shares.shape[-1] - 1
    rows = F.pad(shares.flip(-1), (0, c)).flatten(-2)[..., : c * (w + c)]  # each row one place further right
    found = rows.unflatten(-1, (c, w + c))
    return torch.cat([found[..., :w] * there.mT, found[..., w:]], -1)


class Wide:
    """Blocks that are cut alike in every row, with the keys of the w tokens before each of them.

    recent: :data:`Recent` before the first token, (B, H, w, .) each. tokens: k, v and own gates, (B, T, H, .) each.
    gone: whether, per block, nothing before it is in its window.
    """

    def __init__(self, recent: Recent, tokens: list[Tensor], blocks: Blocks, gone: list[bool]):
        self.w = recent[0].shape[2]
        there, *kept = (x.transpose(1, 2) for x in recent)
        self.joined = [torch.cat([old, x], 1) for old, x in zip(kept, tokens, strict=True)]
        self.there = torch.cat([there, there.new_ones(*tokens[0].shape[:3], 1)], 1)
        starts = torch.tensor([0, *blocks.lengths]).cumsum(0)[:-1]
        self.starts = starts.to(there.device)
        self.first = torch.where(torch.tensor(gone), starts, -self.w).cummax(0).values.to(there.device)

    def of(self, layout: Layout) -> tuple[list[Tensor], Tensor]:
        """k, v and own gates of a run's n blocks, (n, N, w + c, .) each, and whether the first w are there,
        (n, N, w, 1)."""
        tokens = layout.tokens
        part = slice(tokens.start, tokens.stop + self.w)  # the token t stands at w + t
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
