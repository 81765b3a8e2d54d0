"""The floor of nucleotide models: the loss of an interpolated Markov chain of the last few bases."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from titans_pt.genomics.alphabet import FIRST

ORDERS = 12
"""The longest context, in bases."""
STRENGTHS = tuple(4.0**n for n in range(9))
"""Weights of a shorter context's prediction, in observations; one is chosen for each order."""
_MOST = 11
"""Most bases of a context that is counted at once: with the next base 4^12 counts, 134 MB."""


@dataclass(frozen=True)
class Floor:
    """Loss of Markov chains.

    nats: nats per base of each order, from 0.
    order: the best order.
    loss: nats per base of the best order.
    bases: number of predicted bases.
    tokens: number of tokens that hold these bases; the others are N and the ends of documents.
    """

    nats: tuple[float, ...]
    order: int
    loss: float
    bases: int
    tokens: int

    def as_dict(self) -> dict:
        return asdict(self) | {"nats": list(self.nats)}


def markov_floor(
    train: np.ndarray, validation: np.ndarray, orders: int = ORDERS, strengths: Sequence[float] = STRENGTHS
) -> Floor | None:
    """Loss of interpolated Markov chains on ``validation``, in nats per base.

    The probability of order k mixes the counts after its context in ``train`` with the probability of order k - 1:
    p_k(x) = (n(context x) + s p_{k-1}(x)) / (n(context) + s). The strength s of each order and the order itself are the
    best ones on ``validation``, thirteen choices for millions of bases. If a context holds anything but A, C, G and T,
    such as the end of a document, the longest context after it predicts.

    Args:
        train, validation: ids of :mod:`titans_pt.genomics.alphabet`, (N,).
        strengths: values to choose s from.

    Returns:
        None if ``train`` or ``validation`` has no base.
    """
    known = [(ids >= FIRST) & (ids < FIRST + 4) for ids in (train, validation)]
    if not all(mask.any() for mask in known):
        return None
    bases = [
        np.where(mask, ids.astype(np.int8) - FIRST, 0) for ids, mask in zip((train, validation), known, strict=True)
    ]
    targets = np.flatnonzero(known[1])
    p = np.full(len(targets), 0.25)
    losses = []
    for order in range(orders + 1):
        codes, valid = (list(found) for found in zip(*map(_codes, bases, known, (order, order)), strict=True))
        seen, of_context = _counts(codes[0][valid[0]], codes[1][targets], order)
        use = valid[1][targets]
        tried = {s: np.where(use, (seen + s * p) / (of_context + s), p) for s in strengths}
        p = min(tried.values(), key=lambda found: -np.log(found).sum())
        losses.append(float(-np.log(p).mean()))
    order = int(np.argmin(losses))
    return Floor(tuple(losses), order, losses[order], len(targets), len(validation))


def _codes(bases: np.ndarray, known: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 (N,): each base and the ``order`` bases before it as one number; bool (N,): whether all are known."""
    codes, valid = bases.astype(np.int32), known.copy()
    for back in range(1, order + 1):
        codes[back:] += bases[:-back].astype(np.int32) << 2 * back
        valid[back:] &= known[:-back]
        valid[:back] = False
    return codes, valid


def _counts(train: np.ndarray, asked: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts in ``train`` of each code of ``asked``, and of its context with any base. A code has order + 1 bases."""
    if order < _MOST + 1:
        counts = np.bincount(train, minlength=4 ** (order + 1))
        return counts[asked], counts.reshape(-1, 4).sum(1)[asked >> 2]
    seen, of_context, size = np.zeros(len(asked)), np.zeros(len(asked)), 4**order
    for first in range(4):  # by the context's first base: a fourth of the numbers at a time
        own, theirs = asked // size == first, train // size == first
        found = _counts(train[theirs] % size, asked[own] % size, order - 1)
        seen[own], of_context[own] = found
    return seen, of_context
