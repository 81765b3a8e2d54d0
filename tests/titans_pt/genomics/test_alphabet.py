"""Ids and the other strand."""

import numpy as np

from titans_pt.genomics.alphabet import COMPLEMENT, EOS, ONLY_LETTERS, TOKENS, encoded, reverse_complement


def test_one_id_a_base():
    assert len(TOKENS) == 12
    assert encoded(b"ACGTNacgtnRX-").tolist() == [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 11, 11, 11]
    assert b"acgtnRYxuU".translate(ONLY_LETTERS) == b"ACGTNNNNTT"


def test_the_other_strand():
    assert reverse_complement(b"AACGTN") == b"NACGTT"
    assert (COMPLEMENT[encoded(b"AACGTN")[::-1]] == encoded(b"NACGTT")).all()
    assert (COMPLEMENT[COMPLEMENT] == np.arange(12)).all() and COMPLEMENT[EOS] == EOS
