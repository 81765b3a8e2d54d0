"""The twelve ids of nucleotide models (HyenaDNA's), and sequences as bytes: upper-case A, C, G, T and N."""

import numpy as np

SPECIALS = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]")
BASES = b"ACGT"
LETTERS = BASES + b"N"
TOKENS = (*SPECIALS, *LETTERS.decode())
"""Name of each id, as in HyenaDNA's tokenizer; A C G T N are 7 to 11."""
FIRST = len(SPECIALS)
"""Id of A."""
BOS, EOS, PAD, UNKNOWN = SPECIALS.index("[BOS]"), SPECIALS.index("[SEP]"), SPECIALS.index("[PAD]"), TOKENS.index("N")

CODES = b"ACGTUNRYSWKMBDHV-."
"""Letters that IUPAC uses for a nucleotide, an ambiguous nucleotide, or a gap."""
UPPER = bytes(range(256)).upper()
READ = LETTERS + b"U"
"""Letters of files that are read without loss, lower case included: U, of RNA, is T."""
ONLY_LETTERS = bytes(byte if byte in LETTERS else ord("T" if byte == ord("U") else "N") for byte in UPPER)
"""Table for bytes.translate: lower case becomes upper case, U becomes T, everything but A, C, G, T becomes N."""
COMPLEMENTS = bytes.maketrans(b"ACGTacgt", b"TGCAtgca")
"""Table for bytes.translate: each base becomes its complement."""

ENCODED = np.full(256, UNKNOWN, dtype=np.uint8)
"""Byte -> id; upper and lower case are equal, and all bytes but bases are N."""
for _n, _letter in enumerate(LETTERS.decode()):
    ENCODED[[ord(_letter), ord(_letter.lower())]] = FIRST + _n

COMPLEMENT = np.arange(len(TOKENS), dtype=np.int64)
"""Id -> id of the complementary base; N and the specials stay themselves."""
COMPLEMENT[FIRST : FIRST + 4] = COMPLEMENT[FIRST : FIRST + 4][::-1]


def encoded(sequence: bytes) -> np.ndarray:
    """uint8 ids of a sequence, one for each byte."""
    return ENCODED[np.frombuffer(sequence, np.uint8)]


def reverse_complement(sequence: bytes) -> bytes:
    """The other strand, read in its own direction."""
    return sequence.translate(COMPLEMENTS)[::-1]
