"""The Markov floor of chains of known order, and of a real genome."""

import math

import numpy as np
import pytest

from titans_pt.genomics.alphabet import EOS, FIRST, encoded
from titans_pt.genomics.fasta import records
from titans_pt.genomics.genomes import GENOMES
from titans_pt.genomics.markov import _counts, markov_floor


def chain(order: int, length: int, seed: int) -> np.ndarray:
    """Return bases that are, with probability 0.7, the base ``order`` places back plus one (modulo 4)."""
    draw = np.random.default_rng(seed)
    bases = draw.integers(0, 4, length)
    follows = draw.random(length) < 0.7
    for i in range(order, length):
        if follows[i]:
            bases[i] = (bases[i - order] + 1) % 4
    return (bases + FIRST).astype(np.uint8)


def test_the_order_of_a_chain_is_found_and_its_entropy_reached():
    floor = markov_floor(chain(3, 60_000, 0), chain(3, 20_000, 1), orders=5)
    right = 0.7 + 0.3 / 4
    assert floor.loss == pytest.approx(-right * math.log(right) - (1 - right) * math.log((1 - right) / 3), abs=0.02)
    assert floor.nats[2] == pytest.approx(math.log(4), abs=1e-3) and floor.nats[3] == pytest.approx(
        floor.loss, abs=2e-3
    )


def test_what_is_no_base_is_neither_predicted_nor_context():
    train = np.concatenate([chain(1, 5000, 0), [EOS], encoded(b"N"), chain(1, 5000, 1)]).astype(np.uint8)
    some = chain(1, 3000, 2)
    floor = markov_floor(train, np.concatenate([some, [EOS], some]).astype(np.uint8), orders=2)
    assert floor.bases == 6000 and floor.order >= 1
    assert markov_floor(train, np.array([EOS, EOS], np.uint8)) is None


def test_counts_in_fourths_are_counts():
    draw = np.random.default_rng(0)
    train, asked = (draw.integers(0, 4**13, n).astype(np.int32) for n in (20_000, 2000))
    asked = np.concatenate([asked, train[:500], train[:500] ^ 1])
    seen, of_context = _counts(train, asked, 12)
    assert (seen == [(train == code).sum() for code in asked]).all()
    assert (of_context == [(train >> 2 == code >> 2).sum() for code in asked]).all()


@pytest.mark.slow  # downloads 6 MB
def test_escherichia_coli():
    """Hold out every tenth block of 131,072 bases.

    With strength 1 for the next shorter context, the best loss is 1.3407 nats per base, at order 6. With the best
    strength for each order, the longest context is the best one.
    """
    (record,) = records(GENOMES["ecoli"].fasta())
    ids = encoded(record.sequence)
    blocks = [ids[i : i + 131_072] for i in range(0, len(ids), 131_072)]
    train = np.concatenate([block for i, block in enumerate(blocks) if i % 10 != 9])
    validation = np.concatenate(blocks[9::10])
    plain = markov_floor(train, validation, 9, strengths=(1.0,))
    assert (plain.order, round(plain.loss, 4)) == (6, 1.3407)
    best = markov_floor(train, validation)
    assert (best.order, round(best.loss, 4)) == (12, 1.3376)
