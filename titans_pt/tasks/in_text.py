"""Prompts that hide statements in long texts and end with a question and its answer, which alone is trained.

    introduction | text .. statement .. text .. statement .. text | question, up to its answer | answer | text

The text comes from the run's token files (``titans prepare``). A loss on all next tokens hardly teaches the answer,
which is a few of hundreds of tokens (docs/evaluation.md). Short prompts come first, longer ones later.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from titans_pt.config import Config, Section
from titans_pt.data_pipeline.tokenizers import Tokenizer
from titans_pt.errors import UserError
from titans_pt.models.mixers.base import Need
from titans_pt.tasks.answers import VALIDATION_SEED, AnswersOnly, PackedQuestions, WholeAnswers, at_stage
from titans_pt.tasks.base import Samples, TaskData
from titans_pt.tasks.language import Language
from titans_pt.tasks.needles import Lengths, stages
from titans_pt.tools.records import digest

SPREAD = 64
"""Most tokens after an answer. If all answers began at one place of a memory's chunk or a segment, a model would learn
to answer there and nowhere else (docs/notebook.md, "BABILong by answers alone")."""
TRIES = 1000
"""Most draws of a prompt until one fits into its length."""

Asked = tuple[Sequence[int], Sequence[int]]
"""Tokens of a question and of its answer."""


@dataclass(frozen=True)
class Parts:
    """Tokens of a prompt without its text.

    hidden: statements, in their order in the text.
    asked: the last question and its answer.
    others: further questions, each as (told, question with answer). Those that fit are asked in the text, after the
        first ``told`` statements and before the next.
    """

    begin: Sequence[int]
    hidden: Sequence[Sequence[int]]
    asked: Asked
    others: Sequence[tuple[int, Asked]] = ()

    @property
    def count(self) -> int:
        """Tokens without the other questions."""
        return sum(map(len, (self.begin, *self.hidden, *self.asked)))

    def inside(self, room: int) -> tuple[list[Asked], int]:
        """Return the statements, each followed by as many of its questions as ``room`` tokens hold, and the room left.
        A statement has an empty answer."""
        behind: list[list[Asked]] = [[(statement, ())] for statement in self.hidden]
        for told, question in self.others:
            if (left := room - sum(map(len, question))) >= 0:
                room = left
                behind[told - 1].append(question)
        return [*chain(*behind)], room


class PromptsInText(ABC):
    """Prompts of one length, each with its answer (titans_pt.tasks.answers.Questions).

    Statements stand at uniform places between any two tokens of the text; evaluations put them between sentences. The
    text runs on over the end of a document, like rows of training. Text also follows the answer, up to SPREAD tokens
    and a quarter of the length, so that answers begin anywhere.

    Args:
        text: rows of tokens to hide statements in.
        kinds: names of the questions, drawn with equal probability.
        length: tokens of a prompt with its answer.
        setting: name of the setting that gives the length, for errors.
    """

    def __init__(self, tokenizer: Tokenizer, text: Samples, kinds: Sequence[str], length: int, setting: str):
        self.tokenizer, self.text, self.kinds, self.length, self.setting = tokenizer, text, kinds, length, setting

    @abstractmethod
    def parts(self, kind: str, random: Random) -> Parts:
        """Draws a prompt of a kind."""

    def text_of(self, kind: str, count: int, random: Random) -> list[int]:
        """``count`` tokens to hide a prompt of a kind in."""
        row = self.text.sample(random.randrange(len(self.text)))[0]
        first = random.randint(0, len(row) - count)
        return row[first : first + count].tolist()

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64, and places (P,) int64: the token before each of the P tokens of the answers.

        Equal arguments give equal samples, whatever was drawn before.

        Raises:
            UserError: not even a prompt without text fits.
        """
        random = Random(f"{seed} {index}")
        kind = random.choice(self.kinds)
        after = random.randrange(max(1, min(SPREAD, self.length // 4)))
        for _ in range(TRIES):
            found = self.parts(kind, random)
            if (room := self.length - after - found.count) >= 0:
                break
        else:
            raise UserError(
                f"{self.setting}: given {self.length}; with this tokenizer a prompt without text has {found.count} "
                f"tokens: use at least {4 * found.count // 3 + 20}"
            )
        inside, room = found.inside(room)
        text = self.text_of(kind, room + after, random)
        text, rest = text[:room], text[room:]
        ids, at = [*found.begin], 0
        places: list[int] = []
        stand = [*sorted(random.randint(0, room) for _ in inside), room]
        for (part, answer), place in zip((*inside, found.asked), stand, strict=True):
            ids += [*text[at:place], *part]
            places += range(len(ids) - 1, len(ids) - 1 + len(answer))
            ids += answer
            at = place
        return np.array([*ids, *rest], dtype=np.int64), np.array(places)


class InText(AnswersOnly, Language):
    """Base of tasks with prompts in text, in stages of growing length."""

    class Settings(Section):
        lengths: Lengths = "128:6,256:2,512:2,1024,2048"
        """Tokens of a prompt with its answer, LENGTH or LENGTH:PARTS with commas between. They come one after another,
        each for its parts of train.max_steps. As many prompts as fit share a row of data.seq_len tokens."""

    settings: Settings
    unit = "nats per token of the answer"
    figures = ("loss", "accuracy", "whole")
    answer_loss = WholeAnswers

    @abstractmethod
    def prompts(self, text: Samples, length: int, training: bool) -> PromptsInText:
        """Prompts of a length, in a text."""

    @abstractmethod
    def chance_nats(self) -> float:
        """Loss in nats per token of a model that knows only the form of the answers."""

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        lengths = cls.Settings.model_validate(config.section(cls.name)).lengths
        need(
            max(stages(lengths)) <= config.data.seq_len,
            f"{cls.name}.lengths",
            lengths,
            f"each at most data.seq_len={config.data.seq_len}, the tokens of a row",
        )
        kind = config.data.tokenizer.kind
        need(kind != "nucleotides", "data.tokenizer.kind", kind, f"not with task={cls.name}, which asks in English")

    def open(self) -> TaskData:
        found = super().open()
        every = stages(self.settings.lengths)
        train = {n: self.prompts(found.train, n, True) for n in every}
        validation = self.prompts(found.validation, every[-1], False)
        for prompts in train.values():
            for index in range(32):  # a length that holds no prompt is refused now, not in its stage
                prompts.sample(self.seed, index)
        length = self.config.data.seq_len
        return TaskData(
            PackedQuestions(lambda position: train[at_stage(every, position, self)], length, self.seed),
            PackedQuestions(lambda position: validation, length, VALIDATION_SEED),
            found.identity | {"prompts": digest(self.settings.model_dump(mode="json"))}, self.chance_nats(),
        )  # fmt: skip
