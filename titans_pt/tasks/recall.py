"""Multi-query associative recall (MQAR; Zoology, arXiv 2312.04927).

    k1 v1 k2 v2 ... kP vP | filler, at least ``distance`` | k3 v3 . . k1 v1 . k7 v7 ...
        the pairs                                            the queries, in a random order, at random gaps

The model is asked for the value after each key of the third part. Differences from Zoology's generator:

- ``distance`` filler tokens lie between the last pair and the first query, which keeps both out of one window; Zoology
  begins to ask right after the pairs;
- gaps are uniform; Zoology's follow a power law that puts most queries near the pairs, which distance forbids;
- a query's value follows it in the sequence, as it would in text; Zoology has it only as the label;
- every key is asked once and the filler is token 0 throughout: both as in Zoology's own experiments.
"""

from dataclasses import dataclass

import numpy as np

from titans_pt.config import Config, NonNegative, Positive, Section
from titans_pt.models.mixers.base import Need
from titans_pt.tasks.answers import AnswerTask
from titans_pt.tasks.base import TASKS

FILLER = 0


@dataclass(frozen=True)
class MQAR:
    """Keys are drawn from 1 .. vocabulary / 2 - 1, values from the upper half; both without repetition."""

    vocabulary: int = 512
    length: int = 80
    pairs: int = 8
    distance: int = 40

    @property
    def shortest(self) -> int:
        """Tokens of a sample whose queries have no gaps."""
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


@TASKS.register
class Recall(AnswerTask):
    """Key-value pairs, filler, then the keys in another order: which value belongs to each?"""

    name = "recall"
    suites = {"recall": "titans_pt.evaluation.recall:RecallAnswers"}
    usual = ("recall",)

    class Settings(Section):
        pairs: Positive = 8
        """Key-value pairs of a sample."""
        distance: NonNegative = 40
        """Least tokens between the last pair and the first query."""
        length: Positive | None = None
        """Tokens of a sample; as many whole samples as fit share a row of data.seq_len. Null: data.seq_len."""

    settings: Settings

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        settings, size = cls.Settings.model_validate(config.section(cls.name)), config.model.vocab_size
        need(
            settings.pairs < size // 2,
            "recall.pairs",
            settings.pairs,
            f"below {size // 2}: model.vocab_size={size} has {size // 2 - 1} keys",
        )
        length, path = settings.length or config.data.seq_len, "recall.length" if settings.length else "data.seq_len"
        shortest = MQAR(size, length, settings.pairs, settings.distance).shortest
        need(
            length >= shortest,
            path,
            length,
            f"at least {shortest}: {settings.pairs} pairs at distance {settings.distance} need as many tokens",
        )
        need(
            length <= config.data.seq_len,
            "recall.length",
            length,
            f"at most data.seq_len={config.data.seq_len}, the tokens of a row",
        )

    @property
    def mqar(self) -> MQAR:
        """Samples that training draws."""
        settings = self.settings
        length = settings.length or self.config.data.seq_len
        return MQAR(self.config.model.vocab_size, length, settings.pairs, settings.distance)

    def questions(self, position: int | None) -> MQAR:
        return self.mqar
