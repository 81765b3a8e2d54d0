"""Near-duplicates: documents that share most of their sequences of five tokens with an earlier one.

A document's sketch is its MinHash (Broder 1997), made by rensa. The share of places at which two sketches agree
estimates the Jaccard similarity of the documents' sequences. Only documents whose sketches agree at all
places of some band are compared (locality-sensitive hashing): narrow bands hardly ever miss a pair at the threshold.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titans_pt.errors import UserError

PLACES = 128
"""Hashes of a sketch; the standard error of the estimated Jaccard similarity is 0.035 (at 0.8)."""
SEQUENCE = 5
"""Tokens of a sequence, about four words."""
FOUND = 0.99
"""Least chance that a pair at the threshold is compared."""
_SEED = 42
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64
)  # odd numbers of random bits


def sketch(documents: Sequence[np.ndarray]) -> np.ndarray:
    """MinHash of each document's token ids, uint32 (documents, PLACES). A short document is one sequence.

    Raises:
        UserError: rensa is not installed.
    """
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise UserError(
            f"data.near_duplicates: needs rensa, which cannot be imported ({error}); install it: "
            "pip install 'titans-pt[data]'"
        ) from None
    hashes = [_sequences(ids) for ids in documents]
    offsets = np.cumsum([0, *map(len, hashes)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(hashes), offsets, PLACES, _SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(documents), PLACES)


def _sequences(ids: np.ndarray) -> np.ndarray:
    """Hash of each sequence of SEQUENCE ids, uint64."""
    ids = np.pad(ids, (0, max(0, SEQUENCE - len(ids)))).astype(np.uint64) + np.uint64(1)
    found = np.zeros(len(ids) - SEQUENCE + 1, np.uint64)
    for place, factor in enumerate(_FACTORS):
        found += ids[place : place + len(found)] * factor
        found ^= found >> np.uint64(29)
        found *= np.uint64(0xBF58476D1CE4E5B9)
    return found ^ found >> np.uint64(32)


def mark(path: Path, duplicate: np.ndarray, threshold: float) -> int:
    """Sets ``duplicate`` for documents that resemble an earlier one; returns how many were not set before.

    Memory: about 100 bytes per document.

    Args:
        path: sketches of all documents, in order. A sketch of zeros stands for a document that is kept or dropped with
            the next one: the documents of a chat share most of their text.
        duplicate: uint8 (documents,).
        threshold: least Jaccard similarity, as estimated by the sketches.
    """
    before = np.count_nonzero(duplicate)
    if not len(duplicate) or not path.stat().st_size:  # an empty file cannot be mapped
        return 0
    sketches = np.memmap(path, np.uint32, "r").reshape(-1, PLACES)
    sketched = np.flatnonzero(sketches.any(1))
    near = np.zeros(len(sketches), bool)
    width = band_width(threshold)
    for start in range(0, PLACES, width):
        band = np.zeros(len(sketches), np.uint64)
        for place in range(start, start + width):
            band = (band ^ sketches[:, place]) * _FACTORS[place % SEQUENCE]
            band ^= band >> np.uint64(31)
        order = sketched[np.argsort(band[sketched], kind="stable")]
        band = band[order]
        new = np.flatnonzero(np.concatenate([[True], band[1:] != band[:-1]]))  # where a group of equals begins
        first = order[np.repeat(new, np.diff([*new, len(order)]))]
        for others in (first[1:], order[:-1]):  # the group's first, and the previous one of the same group
            pairs = np.flatnonzero((first[1:] == first[:-1]) & (duplicate[order[1:]] == 0))
            for some in np.array_split(pairs, -(-len(pairs) // 100_000) or 1):
                here, there = order[1:][some], others[some]
                like = (sketches[here] == sketches[there]).mean(1) >= threshold
                near[here[like]] = duplicate[here[like]] = 1
    duplicate |= near[sketched[np.searchsorted(sketched, np.arange(len(near)))]]
    return int(np.count_nonzero(duplicate) - before)


def band_width(threshold: float) -> int:
    """Places of a band: the most for which a pair at ``threshold`` is compared with probability FOUND."""
    widths = [width for width in (1, 2, 4, 8, 16, 32, 64, 128) if PLACES % width == 0]
    return max(w for w in widths if w == 1 or 1 - (1 - threshold**w) ** (PLACES // w) >= FOUND)
