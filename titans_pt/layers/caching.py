"""Memory Caching: states of the memory at the ends of earlier segments, read beside the running one.

arXiv 2602.24281. A token t of segment s reads the running memory M_t and the cached memories M_i, i < s:

    y_t = g_s M_t(q_t) + sum_i g_i M_i(q_t)         or, as a soup, (g_s M_t + sum_i g_i M_i)(q_t)

with shares g = softmax_i <u_t, p_i>, where u_t = W_u x_t and p_i is the mean key of segment i. p_s is the mean of the
running segment's keys up to t, token t's key included. Heads decide separately, so that they can be split over ranks.

shares=change is not from the paper. A memory's share depends on how much its segment changed the answer to this query:

    g_i proportional to |M_i(q_t) - B_i(q_t)|^sharpness        B_i: the memory at the beginning of segment i

The segment that wrote the requested value changed the answer, and the memory at the segment's end still holds it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from titans_pt.config import CachingConfig
from titans_pt.kernels.common import sent
from titans_pt.kernels.memory.state import Weights, choose, state_dtype
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops, product
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import join_parts

NONE = -1
"""The number of a slot without a cache."""
_LEAST = 1e-12
"""Added to the square of a change: answers have lengths of about 1 to 10."""


@dataclass
class Caches:
    """Caches that a stream keeps of its segments. Their number is bounded by CachingConfig.slots.

    weights: for each slot, the oldest first, L tensors (B, H, d_in, d_out): the memory that its next token would read.
    pools: for each slot (B, H, D), the mean key of its segment. keys: (B, H, D), sum of the unfinished segment's keys.
    numbers: (B, slots), each cache's segment number in the document; NONE behind a row's last cache.
    place: (B,), tokens read of the document. numbers and place are int64, on the host.
    """

    weights: tuple[Weights, ...]
    pools: tuple[Tensor, ...]
    keys: Tensor
    numbers: Tensor
    place: Tensor

    @staticmethod
    def join_rows(states: "Sequence[Caches]", place: str) -> "Caches":
        """See titans_pt.layers.state.join_rows. All get as many slots as the one that has most."""
        most = max(states, key=lambda caches: len(caches.weights))
        return join_parts([caches.with_slots_of(most) for caches in states], place)

    def with_slots_of(self, most: "Caches") -> "Caches":
        """These caches with empty slots behind, as many as ``most`` has."""
        held, rows = len(self.weights), len(self.keys)
        weights = tuple(tuple(w.new_zeros(rows, *w.shape[1:]) for w in slot) for slot in most.weights[held:])
        pools = tuple(pool.new_zeros(rows, *pool.shape[1:]) for pool in most.pools[held:])
        numbers = torch.cat([self.numbers, self.numbers.new_full((rows, len(weights)), NONE)], 1)
        return replace(self, weights=self.weights + weights, pools=self.pools + pools, numbers=numbers)


@dataclass
class Piece:
    """Tokens begin .. end - 1 of a call, which lie in one segment in every row.

    new_document, ends: for each row, whether a document begins with the piece, and whether a segment ends with it.
    """

    begin: int
    end: int
    new_document: list[bool]
    ends: list[bool]


def pieces(place: list[int], length: int, segment: int, starts: Tensor | None) -> Iterator[Piece]:
    """Cuts a call wherever a segment ends or a document begins in ANY row.

    place: for each row, tokens of its document read before. starts: (B, T) bool, on the host, where documents begin.
    """
    cuts = [length] if starts is None else [*starts.any(0).nonzero().flatten().tolist(), length]
    begin = 0
    while begin < length:
        new = [False] * len(place) if starts is None else starts[:, begin].tolist()
        place = [0 if document else read for document, read in zip(new, place, strict=True)]
        end = min(begin + segment - max(read % segment for read in place), next(cut for cut in cuts if cut > begin))
        place = [read + end - begin for read in place]
        yield Piece(begin, end, new, [read % segment == 0 for read in place])
        begin = end


def segment_starts(place: Tensor, length: int, segment: int, starts: Tensor | None) -> Tensor:
    """(B, T) bool, True where a document or one of its segments begins: with ``fresh`` the memory begins again there.

    place: (B,), tokens of each row's document read before. starts: (B, T) bool, where documents begin; None: nowhere.
    """
    token = torch.arange(length)
    begin = -place[:, None].expand(-1, length)  # of the document that each token belongs to
    if starts is not None:
        begin = torch.where(starts.to("cpu"), token, begin).cummax(1).values
    found = (token - begin) % segment == 0
    return found if starts is None else found.to(starts.device)


class Caching(nn.Module):
    """Shares of the memories, and upkeep of their caches; :class:`titans_pt.layers.memory.NeuralMemory` reads them."""

    sharding = {"u": Shard.COLUMN}
    per_rank = ("n_heads",)

    def __init__(self, d_model: int, width: int, n_heads: int, config: CachingConfig):
        super().__init__()
        self.config, self.n_heads = config, n_heads
        self.reads = True
        """Whether tokens read the caches. If False, segments are still cached, for later tokens that read them."""
        self.u = nn.Linear(d_model, width, bias=False) if config.learned else None

    def begin(self, k: Tensor) -> Caches:
        """Empty caches, for keys k (B, T, H, D)."""
        rows = len(k)
        keys = k.new_zeros(rows, *k.shape[2:], dtype=state_dtype(k))
        return Caches((), (), keys, torch.zeros(rows, 0, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))

    def cut(self, caches: Caches, length: int, documents: Documents | None) -> list[Piece]:
        if len(caches.weights) > self.config.slots:
            raise ValueError(f"state: given one of {len(caches.weights)} caches; this memory has {self.config.slots}")
        starts = None if documents is None else documents.host
        return list(pieces(caches.place.tolist(), length, self.config.segment, starts))

    def vectors(self, x: Tensor) -> Tensor | None:
        """u_t of tokens x (B, T, d_model), (B, T, H, D); None if shares are not learned."""
        return None if self.u is None else self.u(x).to(state_dtype(x)).unflatten(-1, (self.n_heads, -1))

    def begun(self, caches: Caches, new_document: list[bool]) -> Caches:
        """Caches before a piece: they are emptied in rows in which a document begins."""
        if not any(new_document):
            return caches
        begins = torch.tensor(new_document)
        keys = torch.where(sent(begins, caches.keys.device).view(-1, 1, 1), 0.0, caches.keys)
        numbers = torch.where(begins.view(-1, 1), NONE, caches.numbers)
        held = int((numbers != NONE).sum(1).max())
        return Caches(
            caches.weights[:held], caches.pools[:held], keys, numbers[:, :held], torch.where(begins, 0, caches.place)
        )

    @staticmethod
    def weighted(running: Tensor, cached: Iterable[Tensor], shares: Tensor) -> Tensor:
        """Mean, (B, t, H, D), of the ``running`` memory's and each ``cached`` one's answers, weighted by ``shares``."""
        y = running * shares[..., :1]
        for n, answer in enumerate(cached, 1):
            y = y + shares[..., n : n + 1] * answer
        return y

    def by_change(self, running: Tensor, cached: Iterable[Tensor], first: Tensor, caches: Caches) -> Tensor:
        """Mean of the answers, as :meth:`weighted` returns it, with shares=change. first: M_0's answers."""
        # An online softmax of sharpness * log |change|: holding all answers at once would take much memory.
        dtype, power = state_dtype(running), self.config.sharpness / 2
        top = torch.full_like(first[..., :1], power * math.log(_LEAST), dtype=dtype)
        total, count, before = torch.zeros_like(first, dtype=dtype), torch.zeros_like(top), first.to(dtype)
        here = torch.cat([caches.numbers != NONE, torch.ones(len(running), 1, dtype=torch.bool)], 1)
        here = sent(here, running.device).view(*here.shape, 1, 1, 1)
        for answer, visible in zip(chain(cached, [running]), here.unbind(1), strict=True):
            answer = answer.to(dtype)
            score = power * ((answer - before).square().sum(-1, keepdim=True) + _LEAST).log()
            score = score.masked_fill(~visible, -torch.inf)
            if not self.config.fresh:
                before = torch.where(visible, answer, before)
            higher = torch.maximum(top, score.detach())
            kept, share = (top - higher).exp(), (score - higher).exp()
            total, count, top = kept * total + share * answer, kept * count + share, higher
        return total / count

    def shares(self, u: Tensor | None, k: Tensor, caches: Caches) -> Tensor | None:
        """Shares of the running memory and each cache for a piece's tokens, (B, t, H, 1 + n) in the states' dtype. None
        with shares=change, which depends on the memories' answers.

        u: from :meth:`vectors`, (B, t, H, D). k: (B, t, H, D), the tokens' keys.
        """
        config, dtype, device = self.config, state_dtype(k), k.device
        if config.shares == "change":
            return None
        here = torch.cat([torch.ones(len(k), 1, dtype=torch.bool), caches.numbers != NONE], 1)
        if u is None:
            if config.shares == "sum":
                found = here.to(dtype)
            else:
                now = caches.place // config.segment
                age = torch.cat([torch.zeros(len(k), 1), now[:, None] - caches.numbers], 1).to(dtype)
                found = torch.where(here, config.decay**age, 0.0)
                found = found / found.sum(1, keepdim=True)
            return sent(found, device)[:, None, None].expand(*k.shape[:3], -1)
        read = sent(caches.place % config.segment, device).view(-1, 1, 1, 1)
        count = read + torch.arange(1, k.shape[1] + 1, device=device).view(-1, 1, 1)
        running = (caches.keys.unsqueeze(1) + k.to(dtype).cumsum(1)) / count
        scores = (u * running).sum(-1, keepdim=True)
        if caches.pools:
            scores = torch.cat([scores, torch.einsum("bthd,bnhd->bthn", u, torch.stack(caches.pools, 1))], -1)
        visible = sent(here, device)[:, None, None]
        scores = scores.masked_fill(~visible, -torch.inf)
        if config.shares == "sparse" and scores.shape[-1] > 1 + config.top:
            kept = scores[..., 1:].topk(config.top, -1).indices + 1
            counts = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, kept, True)
            counts[..., 0] = True
            scores = scores.masked_fill(~counts, -torch.inf)
        return scores.softmax(-1)

    def after(self, caches: Caches, piece: Piece, k: Tensor, weights: Weights) -> Caches:
        """Caches after a piece with keys k (B, t, H, D), at whose end the memory has ``weights``."""
        segment = self.config.segment
        keys, place = caches.keys + k.to(caches.keys.dtype).sum(1), caches.place + k.shape[1]
        caches = replace(caches, keys=keys, place=place)
        if not any(piece.ends):
            return caches
        new, pool, number = tuple(weights), keys / segment, place // segment - 1
        ends, numbers = torch.tensor(piece.ends), caches.numbers
        held = (numbers != NONE).sum(1)
        slots = min(self.config.slots, int(torch.where(ends, held + 1, held).max()))
        if slots > numbers.shape[1]:  # in a row without this cache, the slot's content has no share
            numbers = torch.cat([numbers, numbers.new_full((len(numbers), 1), NONE)], 1)
            caches = replace(caches, weights=(*caches.weights, new), pools=(*caches.pools, pool))
        # In a full row the oldest cache goes: each slot takes the next one's. The row's last slot takes the new cache.
        last = torch.where(ends, held.clamp(max=slots - 1), slots)
        moved = torch.where(ends, torch.where(held == slots, 0, held), slots)
        weights_of: list[Weights] = []
        pools: list[Tensor] = []
        columns: list[Tensor] = []
        for n in range(slots):
            shifts, takes = ((moved <= n) & (n < last)).tolist(), (last == n).tolist()
            behind = min(n + 1, slots - 1)
            weights_of.append(choose(takes, new, choose(shifts, caches.weights[behind], caches.weights[n])))
            pools += choose(takes, (pool,), choose(shifts, (caches.pools[behind],), (caches.pools[n],)))
            columns += choose(takes, (number,), choose(shifts, (numbers[:, behind],), (numbers[:, n],)))
        keys = torch.where(sent(ends, keys.device).view(-1, 1, 1), 0.0, keys)
        return Caches(tuple(weights_of), tuple(pools), keys, torch.stack(columns, 1), place)

    # ---- costs, for the plan and the FLOP count

    def mean_read(self, length: int) -> tuple[float, float]:
        """Mean number of caches that a token of a document of ``length`` has, and mean number of reads that count."""
        config = self.config
        held = counted = 0
        for begin in range(0, length, config.segment):
            tokens, caches = min(config.segment, length - begin), min(begin // config.segment, config.slots)
            held += tokens * caches
            first = config.shares == "change" and caches > 0  # M_0 is read, for the change since
            counted += tokens * (min(caches, config.top) if config.shares == "sparse" else caches + first)
        return held / length, counted / length

    def flops(self, length: int, width: int, read: Flops) -> Flops:
        """Per token. read: FLOPs of one read of a memory. With shares=sparse only caches that count are included."""
        held, counted = self.mean_read(length)
        own = Flops(0, 0) if self.u is None else product(self.u.in_features, width) + product(width, held)
        return own + counted * read
