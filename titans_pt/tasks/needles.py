"""Needles in noise: keys and values hidden among random tokens and asked for at the end, at lengths that grow.

noise .. MARK k3 v3 .. noise .. MARK k1 v1 .. noise .. | ASK k1 v1 ASK k3 v3 ...
    needles at uniform places among random noise              the questions, in a random order
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from titans_pt.config import Config, NonNegative, Positive, Section
from titans_pt.models.mixers.base import Need
from titans_pt.tasks.answers import AnswerTask, at_stage
from titans_pt.tasks.base import TASKS

MARK, ASK = 0, 1


@dataclass(frozen=True)
class NeedlesInNoise:
    """Samples of needles in noise. A quarter of the vocabulary is keys, a quarter values; the rest is noise, except for
    the two signs."""

    vocabulary: int = 256
    length: int = 1024
    needles: int = 4
    held_out: int = 0
    """Number of noise tokens that training does not draw: the last tokens of the vocabulary."""
    unseen: bool = False
    """Draw noise from the held-out tokens alone."""

    @property
    def tail(self) -> int:
        """Tokens of the questions and their answers, at the end."""
        return 3 * self.needles

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary // 4)

    @property
    def noise(self) -> np.ndarray:
        """The tokens that noise is drawn from."""
        quarter = self.vocabulary // 4
        every = np.concatenate([np.arange(2, quarter), np.arange(3 * quarter, self.vocabulary)])
        drawn = len(every) - self.held_out
        return every[drawn:] if self.unseen else every[:drawn]

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64 and the places (needles,) of the asked keys, ascending; the answer follows each.

        Equal arguments give equal samples, whatever was drawn before.
        """
        draw = np.random.default_rng([seed, index])
        quarter = self.vocabulary // 4
        keys = quarter + draw.choice(quarter, self.needles, replace=False)
        values = 2 * quarter + draw.choice(quarter, self.needles, replace=False)
        ids = draw.choice(self.noise, self.length)
        end = self.length - self.tail
        # Needles of three tokens at random places: choose among the places left when each is one token wide.
        free = end - 2 * self.needles
        places = np.sort(draw.choice(free, self.needles, replace=False)) + 2 * np.arange(self.needles)
        ids[places], ids[places + 1], ids[places + 2] = MARK, keys, values
        order = draw.permutation(self.needles)
        asked = end + 3 * np.arange(self.needles)
        ids[asked], ids[asked + 1], ids[asked + 2] = ASK, keys[order], values[order]
        return ids, asked + 1


Lengths = Annotated[str, Field(pattern=r"^[1-9]\d*(:[1-9]\d*)?(,[1-9]\d*(:[1-9]\d*)?)*$")]
"""Lengths of a training's stages: LENGTH or LENGTH:PARTS with commas between."""


def stages(lengths: str) -> list[int]:
    """The length of each part of a training: "96:3,256" -> [96, 96, 96, 256]."""
    pairs = (word.partition(":") for word in lengths.split(","))
    return [int(length) for length, _, parts in pairs for _ in range(int(parts or 1))]


@TASKS.register
class Needles(AnswerTask):
    """Needles shown once in noise and asked for at the end: first in short samples, in longer ones later."""

    name = "needles"
    suites = {"needles": "titans_pt.evaluation.needles:NeedleAnswers"}
    usual = ("needles",)

    class Settings(Section):
        needles: Positive = 8
        """Needles of a sample, with a key and a value each."""
        lengths: Lengths = "96:8,256,512,1024,2048"
        """Lengths of samples in tokens, LENGTH or LENGTH:PARTS with commas between. They come one after the other, each
        for its parts of train.max_steps. As many whole samples as fit share a row of data.seq_len tokens."""
        held_out: NonNegative = 0
        """Noise tokens that training never draws, for ``evaluation.needles.noise=unseen``."""

    settings: Settings

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        settings, size = cls.Settings.model_validate(config.section(cls.name)), config.model.vocab_size
        lengths = stages(settings.lengths)
        need(size >= 8, "model.vocab_size", size, "signs, keys, values and noise need at least 8")
        need(
            settings.held_out < size // 4,
            "needles.held_out",
            settings.held_out,
            f"below {size // 4}, a quarter of model.vocab_size={size}",
        )
        fits = min(size // 4, min(lengths) // 6)
        need(
            settings.needles <= fits,
            "needles.needles",
            settings.needles,
            f"at most {fits}: model.vocab_size={size} has {size // 4} keys, and the shortest sample "
            f"({min(lengths)} tokens) holds {min(lengths) // 6}",
        )
        need(
            max(lengths) <= config.data.seq_len,
            "needles.lengths",
            settings.lengths,
            f"each at most data.seq_len={config.data.seq_len}, the tokens of a row; set data.seq_len={max(lengths)}",
        )

        cls._check_questions(config, settings, need)

    @staticmethod
    def _check_questions(config: Config, settings: "Needles.Settings", need: Need):
        asked, keys = config.evaluation.needles, config.model.vocab_size // 4
        counts = asked.needles or [settings.needles]
        need(
            asked.noise == "seen" or settings.held_out > 0,
            "evaluation.needles.noise",
            asked.noise,
            "training drew every noise token: train with needles.held_out above 0",
        )
        need(
            max(counts) <= keys,
            "evaluation.needles.needles",
            max(counts),
            f"at most {keys}, the keys of model.vocab_size={config.model.vocab_size}",
        )
        need(
            min(asked.lengths) >= 6 * max(counts),
            "evaluation.needles.lengths",
            min(asked.lengths),
            f"at least {6 * max(counts)} for {max(counts)} needles",
        )

    def questions(self, position: int | None) -> NeedlesInNoise:
        """Samples at ``position``: all samples of a step have one length; validation has the last length."""
        settings = self.settings
        length = at_stage(stages(settings.lengths), position, self)
        return NeedlesInNoise(self.config.model.vocab_size, length, settings.needles, settings.held_out)
