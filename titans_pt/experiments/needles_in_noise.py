"""Needles in noise: the task, a pure function of (seed, index), and the lengths at which it is learned.

    noise .. MARK k3 v3 .. noise .. MARK k1 v1 .. noise .. | ASK k1 v1 ASK k3 v3 ...
        needles at uniform places among random noise              the questions, in a random order
"""

import re
from dataclasses import dataclass

import numpy as np

from titans_pt.errors import UserError
from titans_pt.experiments.study import Samples

MARK, ASK = 0, 1


@dataclass(frozen=True)
class NeedlesInNoise(Samples):
    """A quarter of the vocabulary are keys, a quarter values, the rest is noise, but for the two signs."""

    vocabulary: int = 256
    length: int = 1024
    needles: int = 4
    held_out: int = 0
    """The last tokens of the vocabulary, which are noise that is not drawn."""
    unseen: bool = False
    """Draw noise from the held-out tokens alone."""

    def __post_init__(self):
        if self.vocabulary < 8:
            raise UserError(f"model.vocab_size: given {self.vocabulary}; signs, keys, values and noise need at least 8")
        if self.held_out >= self.vocabulary // 4:
            raise UserError(
                f"--held-out: given {self.held_out}; allowed: less than {self.vocabulary // 4}, a quarter of "
                f"model.vocab_size={self.vocabulary}"
            )
        if self.unseen and not self.held_out:
            raise UserError("--noise: given 'unseen'; training drew every noise token: train with --held-out N")
        if self.needles > self.vocabulary // 4 or self.length < 6 * self.needles:
            raise UserError(
                f"--needles: given {self.needles}; model.vocab_size={self.vocabulary} has {self.vocabulary // 4} keys, "
                f"and {self.length} tokens hold at most {self.length // 6}"
            )

    @property
    def tail(self) -> int:
        """Tokens of the questions and their answers, at the end."""
        return 3 * self.needles

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary // 4)

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64 and the places (needles,) of the asked keys, ascending; the answer follows each.

        Equal arguments give equal samples, whatever was drawn before.
        """
        draw = np.random.default_rng([seed, index])
        quarter = self.vocabulary // 4
        keys = quarter + draw.choice(quarter, self.needles, replace=False)
        values = 2 * quarter + draw.choice(quarter, self.needles, replace=False)
        noise = np.concatenate([np.arange(2, quarter), np.arange(3 * quarter, self.vocabulary)])
        drawn = len(noise) - self.held_out
        ids = draw.choice(noise[drawn:] if self.unseen else noise[:drawn], self.length)
        end = self.length - self.tail
        # Three tokens each at random places: choose among the places left when each is one token wide.
        free = end - 2 * self.needles
        places = np.sort(draw.choice(free, self.needles, replace=False)) + 2 * np.arange(self.needles)
        ids[places], ids[places + 1], ids[places + 2] = MARK, keys, values
        order = draw.permutation(self.needles)
        asked = end + 3 * np.arange(self.needles)
        ids[asked], ids[asked + 1], ids[asked + 2] = ASK, keys[order], values[order]
        return ids, asked + 1


@dataclass(frozen=True)
class Curriculum:
    """Lengths of training, one after the other, and how many parts of the steps each gets.

    Args:
        text: LENGTH or LENGTH:PARTS, with commas between.

    Raises:
        UserError: ``text`` is something else.
    """

    text: str

    def __post_init__(self):
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?(,[1-9]\d*(:[1-9]\d*)?)*", self.text):
            raise UserError(f"--lengths: given {self.text!r}; write LENGTH or LENGTH:PARTS, with commas between")

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(length, parts)."""
        pairs = [word.split(":") for word in self.text.split(",")]
        return [(int(pair[0]), int(pair[1]) if len(pair) == 2 else 1) for pair in pairs]

    @property
    def lengths(self) -> list[int]:
        return [length for length, _ in self.stages]

    def length(self, step: int, steps: int) -> int:
        """Of the samples of step 0 <= ``step`` < ``steps``."""
        every = [length for length, parts in self.stages for _ in range(parts)]
        return every[step * len(every) // steps]

    def last_begins(self, steps: int) -> int:
        """The first step of the last length."""
        total = sum(parts for _, parts in self.stages)
        return -(-steps * (total - self.stages[-1][1]) // total)
