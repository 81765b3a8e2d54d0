"""Long texts whose tokens are known piece by piece: a prompt of ten million tokens costs a copy, not a tokenisation.

A haystack is a list of units (words, lines or sentences) that repeats forever. A prompt is a list of parts: strings,
and stretches of the haystack. Its tokens are the concatenated tokens of its parts. They equal the tokens of the whole
text if the tokenizer does not merge across the units' separators, as SentencePiece does not by default. :func:`fill`
checks this, and tokenises whole texts otherwise.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titans_pt.data_pipeline.tokenizers import ids_after
from titans_pt.errors import UserError

CHECKED_UNITS = (0, 1, 2, 7, 40)
"""Sizes of the short prompts on which :func:`fill` compares the two ways of tokenising."""


class Haystack:
    """``units`` joined by ``separator``, repeated forever.

    Args:
        tokenizer: its ``encode`` is used; :func:`fill` also uses ``document``.
        units: at least one; a prompt holds a whole number of them.
        ends: number of units up to the end of each sentence of one turn, ascending; the last is ``len(units)``. Needles
            go only between sentences. None: every unit is a sentence.
    """

    def __init__(self, tokenizer: Any, units: Sequence[str], separator: str, ends: Sequence[int] | None = None):
        self.tokenizer, self.units, self.separator = tokenizer, list(units), separator
        self.ends = np.arange(1, len(self.units) + 1) if ends is None else np.asarray(ends)

    @cached_property
    def sha256(self) -> str:
        text = "\0".join([self.separator, *self.units, *map(str, self.ends.tolist())])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """ids (N,) int32 of one turn, with a separator before every unit, and the places (U + 1,) where units begin."""
        known: dict[str, list[int]] = {}
        for unit in self.units:
            if unit not in known:
                known[unit] = ids_after(self.tokenizer, "a", self.separator + unit)
        ids = np.fromiter((i for unit in self.units for i in known[unit]), np.int32)
        return ids, np.cumsum([0, *(len(known[unit]) for unit in self.units)])

    @cached_property
    def exact(self) -> bool:
        """Whether the tokens of one turn are the concatenated tokens of its units."""
        step = 1000  # units at a time: a tokenizer needs much memory for a long text
        for start in range(0, len(self.units), step):
            stop = min(start + step, len(self.units))
            whole = ids_after(self.tokenizer, "a", self.separator + self.text(start, stop + 1))
            if not np.array_equal(whole, self.ids(start, stop + 1)):
                return False
        return True

    def unit(self, i: int) -> str:
        return self.units[i % len(self.units)]

    def text(self, start: int, stop: int) -> str:
        return self.separator.join(self.unit(i) for i in range(start, stop))

    def count(self, start: int, stop: int) -> int:
        """Tokens of units start .. stop - 1, each with the separator before it."""
        return self._before(stop) - self._before(start)

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens of units start .. stop - 1, each with the separator before it, int32."""
        whole, _ = self._tokens
        first, last = self._before(start), self._before(stop)
        skipped = first // len(whole)
        turns = -(-last // len(whole)) - skipped
        return np.tile(whole, turns)[first - skipped * len(whole) : last - skipped * len(whole)]

    def _before(self, unit: int) -> int:
        whole, begins = self._tokens
        turns, rest = divmod(unit, len(self.units))
        return turns * len(whole) + int(begins[rest])

    def sentences(self, units: int) -> int:
        """Number of sentences in the first ``units`` units; a cut sentence counts."""
        turns, rest = divmod(units, len(self.units))
        return turns * len(self.ends) + (int(np.searchsorted(self.ends, rest)) + 1 if rest else 0)

    def end_of(self, sentences: int, units: int) -> int:
        """Number of units in the first ``sentences`` sentences of a haystack that is cut after ``units``."""
        turns, rest = divmod(sentences, len(self.ends))
        return min(units, turns * len(self.units) + (int(self.ends[rest - 1]) if rest else 0))


@dataclass(frozen=True)
class Stretch:
    """Units start .. stop - 1 of the haystack, ``lead`` before the first and separators between them."""

    lead: str
    start: int
    stop: int


Part = str | Stretch


def context(
    haystack: Haystack, units: int, inserts: Sequence[tuple[int, str]], lead: str, start: int = 0, empty: bool = False
) -> list[Part]:
    """Arrange ``units`` units from unit ``start`` on, with strings between them.

    Args:
        inserts: (units before it, string), ascending.
        lead: stands before the first part; the separator stands before all others.
        empty: keep the separator of a stretch without units, as joining an empty string with others does.
    """
    parts: list[Part] = []
    glue = lead  # an empty stretch leaves it to the next part
    at = 0
    for place, text in inserts:
        if at < place:
            parts.append(Stretch(glue, start + at, start + place))
            glue = haystack.separator
        elif empty:
            glue += haystack.separator
        parts.append(glue + text)
        glue, at = haystack.separator, place
    if at < units:
        parts.append(Stretch(glue, start + at, start + units))
    elif empty:
        parts.append(glue)
    return parts


class _Pieces:
    """Tokens of prompts, part by part; a prompt begins as documents do in training."""

    def __init__(self, tokenizer: Any, haystack: Haystack):
        self.tokenizer, self.haystack = tokenizer, haystack
        self.known: dict[tuple[str | None, str], list[int]] = {}

    def _string(self, before: str | None, text: str) -> list[int]:
        """Ids of ``text`` after ``before``; None: it begins the document."""
        if (before, text) not in self.known:
            if before is None:
                own = self.tokenizer.document(text)
            else:
                own = ids_after(self.tokenizer, before, text) if before else self.tokenizer.encode(text)
            self.known[before, text] = list(own)
        return self.known[before, text]

    def _each(self, parts: Sequence[Part], stretch: Callable[[int, int], Any], string: Callable[[list[int]], Any]):
        """Yields, for each part in order, the list of results of ``stretch`` or ``string``."""
        hay, before = self.haystack, None
        for part in parts:
            if isinstance(part, str):
                yield [string(self._string(before, part))]
                before = part
            elif part.lead == hay.separator and before is not None:
                yield [stretch(part.start, part.stop)]
                before = hay.unit(part.stop - 1)
            else:
                first = self._string(before, part.lead + hay.unit(part.start))
                yield [string(first), stretch(part.start + 1, part.stop)]
                before = hay.unit(part.stop - 1)

    def counts(self, parts: Sequence[Part]) -> list[int]:
        return [sum(x) for x in self._each(parts, self.haystack.count, len)]

    def ids(self, parts: Sequence[Part]) -> Tensor:
        def array(ids: list[int]) -> np.ndarray:
            return np.array(ids, np.int32)

        return torch.from_numpy(np.concatenate([y for x in self._each(parts, self.haystack.ids, array) for y in x]))


class _Whole:
    """Counterpart of _Pieces that tokenises whole texts: right with any tokenizer, and slow."""

    def __init__(self, tokenizer: Any, haystack: Haystack):
        self.tokenizer, self.haystack = tokenizer, haystack

    def counts(self, parts: Sequence[Part]) -> list[int]:
        lengths = [0, *(len(self.ids(parts[:i])) for i in range(1, len(parts) + 1))]
        return [b - a for a, b in pairwise(lengths)]

    def ids(self, parts: Sequence[Part]) -> Tensor:
        return torch.tensor(self.tokenizer.document(prompt_text(parts, self.haystack)), dtype=torch.int32)


def prompt_text(parts: Sequence[Part], haystack: Haystack) -> str:
    return "".join(p if isinstance(p, str) else p.lead + haystack.text(p.start, p.stop) for p in parts)


class TooShort(UserError):
    """A prompt that does not fit, even without a haystack.

    lacking: number of tokens by which it is too long.
    """

    def __init__(self, message: str, lacking: int):
        super().__init__(message)
        self.lacking = lacking


@dataclass(frozen=True)
class Filled:
    """The longest prompt that fits."""

    ids: Tensor
    """(T,) int32, on the CPU."""
    counts: list[int]
    """Tokens of each part; they sum to T."""
    units: int
    """Units of haystack in the prompt."""
    parts: list[Part]


def fill(
    tokenizer: Any,
    haystack: Haystack,
    arrange: Callable[[int], list[Part]],
    budget: int,
    setting: str,
    most: float = math.inf,
) -> Filled:
    """Build the prompt with the most units of haystack in at most ``budget`` tokens.

    Args:
        arrange: number of units -> the prompt's parts; a pure function.
        setting: the setting to raise if nothing fits, for the message.
        most: number of units in a haystack that must not repeat; infinite for one that may.

    Raises:
        TooShort: not even a prompt without a haystack fits.
    """
    pieces, whole = _Pieces(tokenizer, haystack), _Whole(tokenizer, haystack)
    # The short prompts have every case of a longer one: a cut sentence, a needle at either end.
    short = [arrange(n) for n in CHECKED_UNITS if n <= most]
    exact = haystack.exact and all(torch.equal(pieces.ids(parts), whole.ids(parts)) for parts in short)

    def length(units: int) -> int:
        return sum(pieces.counts(arrange(units))) if exact else len(whole.ids(arrange(units)))

    source = pieces if exact else whole
    if (least := length(0)) > budget:
        raise TooShort(
            f"{setting}: given {budget} tokens and room for the answer; with this tokenizer a prompt without a "
            f"haystack has {least}: use at least {least - budget} more", least - budget
        )  # fmt: skip
    low, high = 0, 1
    while high <= most and length(high) <= budget:
        low, high = high, 2 * high
    high = int(min(high, most + 1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= budget else (low, middle)
    parts = arrange(low)
    return Filled(source.ids(parts), source.counts(parts), low, parts)
