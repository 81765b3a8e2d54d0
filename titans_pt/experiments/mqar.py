"""Multi-query associative recall (MQAR; Zoology, arXiv 2312.04927): the task, a pure function of (seed, index).

    k1 v1 k2 v2 ... kP vP | filler, at least ``distance`` | k3 v3 . . k1 v1 . k7 v7 ...
        the pairs                                            the queries, in a random order, at random gaps

What is asked: the value after each key of the third part. Differences from Zoology's generator:

- ``distance`` filler tokens lie between the last pair and the first query, so that no window sees both;
  Zoology begins to ask right after the pairs;
- gaps are uniform; Zoology's follow a power law that puts most queries near the pairs, which distance forbids;
- a query's value follows it in the sequence, as it would in text; Zoology has it only as the label;
- every key is asked once and the filler is token 0 throughout: both as in Zoology's own experiments.
"""

from dataclasses import dataclass

import numpy as np

from titans_pt.errors import UserError
from titans_pt.experiments.study import Samples

FILLER = 0


@dataclass(frozen=True)
class MQAR(Samples):
    """Keys are drawn from 1 .. vocabulary / 2 - 1, values from the upper half; both without repetition."""

    vocabulary: int = 512
    length: int = 80
    pairs: int = 8
    distance: int = 40

    def __post_init__(self):
        if self.pairs >= self.vocabulary // 2:
            raise UserError(
                f"pairs: given {self.pairs}; model.vocab_size={self.vocabulary} has {self.vocabulary // 2 - 1} keys"
            )
        if self.length < self.shortest:
            raise UserError(
                f"data.seq_len: given {self.length}; {self.pairs} pairs at distance {self.distance} "
                f"need at least {self.shortest}"
            )

    @property
    def shortest(self) -> int:
        """Tokens of a sequence whose queries have no gaps."""
        return 4 * self.pairs + self.distance

    @property
    def chance(self) -> float:
        """Accuracy of a guesser who knows which tokens are values, and nothing else."""
        return 1 / (self.vocabulary - self.vocabulary // 2)

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64, and the places of the queried keys (pairs,), ascending; the answer follows each.

        Equal arguments give equal samples, whatever was drawn before.
        """
        draw = np.random.default_rng([seed, index])
        half = self.vocabulary // 2
        keys = 1 + draw.choice(half - 1, self.pairs, replace=False)
        values = half + draw.choice(self.vocabulary - half, self.pairs, replace=False)
        ids = np.full(self.length, FILLER, dtype=np.int64)
        ids[0 : 2 * self.pairs : 2], ids[1 : 2 * self.pairs : 2] = keys, values

        first = 2 * self.pairs + self.distance
        # Queries of two tokens at random places: choose among the places left when each query is one token wide.
        free = self.length - first - self.pairs
        places = first + np.sort(draw.choice(free, self.pairs, replace=False)) + np.arange(self.pairs)
        order = draw.permutation(self.pairs)
        ids[places], ids[places + 1] = keys[order], values[order]
        return ids, places
