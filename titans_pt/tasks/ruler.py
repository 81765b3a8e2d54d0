"""RULER's needles in text, trained by their answers alone: in short texts first, in longer ones later.

    instruction | text .. needle .. text | question, and the beginning of its answer | answer

The sentences are RULER's; the text is that of the run's token files (``titans prepare``), or RULER's noise. Only the
answer counts. Next tokens of such documents hardly teach it: a number is seven of hundreds of tokens, and digits that
text uses all alike (docs/evaluation.md).
"""

from collections.abc import Sequence
from random import Random
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from titans_pt.config import Config, Section
from titans_pt.data_pipeline.tokenizers import Tokenizer, ids_after
from titans_pt.errors import UserError
from titans_pt.models.mixers.base import Need
from titans_pt.tasks.answers import VALIDATION_SEED, AnswersOnly, PackedQuestions, WholeAnswers, at_stage
from titans_pt.tasks.base import TASKS, Samples, Task, TaskData
from titans_pt.tasks.language import Language
from titans_pt.tasks.needles import Lengths, stages
from titans_pt.tasks.ruler_words import (
    CHANCE_NATS,
    HEAD,
    NOISE,
    Draw,
    NeedleTask,
    draw_sample,
    needle_of,
    question_of,
)
from titans_pt.tasks.ruler_words import TASKS as RULER
from titans_pt.tools.records import digest

TRIES = 1000
"""Draws of a prompt at most, until its keys are short enough for its length."""
Kind = Literal["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"]


class RulerPrompts:
    """Prompts of one length, each with its answer (titans_pt.tasks.answers.Questions).

    Needles stand between any two tokens of the text; RULER's evaluation puts them between sentences. A text goes on
    where its document ends, as rows of training do.

    Args:
        text: rows of tokens to hide needles in.
        kinds: names of RULER's tasks, drawn alike.
    """

    def __init__(self, tokenizer: Tokenizer, text: Samples, kinds: Sequence[str], length: int):
        self.tokenizer, self.text, self.kinds, self.length = tokenizer, text, kinds, length
        self._noise = ids_after(tokenizer, "a", "\n" + NOISE)

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64, and the places (P,) int64 of the tokens that one of the answer's P tokens follows.

        Equal arguments give equal samples, whatever was drawn before.

        Raises:
            UserError: not even a prompt without text fits.
        """
        random = Random(f"{seed} {index}")
        task = RULER[random.choice(self.kinds)]
        for _ in range(TRIES):
            begin, needles, end, answer = self._parts(task, draw_sample(task, None, random))
            fixed = len(begin) + len(end) + len(answer) + sum(map(len, needles))
            if (room := self.length - fixed) >= 0:
                break
        else:
            raise UserError(
                f"ruler.lengths: given {self.length}; with this tokenizer a prompt without text has {fixed} tokens: "
                f"use at least {fixed + 20}"
            )
        text = self._noise_of(room) if task.haystack == "noise" else self._text_of(room, random)
        ids, at = [*begin], 0
        for needle, place in zip(needles, sorted(random.randint(0, room) for _ in needles), strict=True):
            ids += [*text[at:place], *needle]
            at = place
        ids += [*text[at:], *end, *answer]
        first = self.length - len(answer)
        return np.array(ids, dtype=np.int64), np.arange(first - 1, self.length - 1)

    def _parts(self, task: NeedleTask, drawn: Draw) -> tuple[list[int], list[list[int]], list[int], list[int]]:
        """Tokens of the instruction, each needle, the question with the beginning of its answer, and the answer."""
        separator, tail = "\n" if task.haystack == "noise" else " ", question_of(task, drawn.asked)
        needles = [ids_after(self.tokenizer, "a", separator + needle_of(task, *told)) for told in drawn.told]
        begin = list(self.tokenizer.document(HEAD.format(**task.words) + "\n"))
        (expected,) = drawn.expected
        return begin, needles, ids_after(self.tokenizer, "a", tail), ids_after(self.tokenizer, tail, f" {expected}")

    def _noise_of(self, count: int) -> list[int]:
        return (self._noise * (count // len(self._noise) + 1))[:count]

    def _text_of(self, count: int, random: Random) -> list[int]:
        row = self.text.sample(random.randrange(len(self.text)))[0]
        first = random.randint(0, len(row) - count)
        return row[first : first + count].tolist()


@TASKS.register
class Ruler(AnswersOnly, Language):
    """The answer to a question about a long text that says it once."""

    name = "ruler"
    unit = "nats per token of the answer"
    takes = ("language",)
    figures = ("loss", "accuracy", "whole")
    answer_loss = WholeAnswers
    cut = Task.cut  # Language's cuts batches of two parts

    class Settings(Section):
        tasks: Annotated[list[Kind], Field(min_length=1)] = ["niah_single_1", "niah_single_2"]
        """RULER's tasks, drawn alike: niah_single_1 (in noise), niah_single_2 (in text), niah_single_3 (uuids),
        niah_multikey_1 (four keys, of which one is asked). What is listed twice is drawn twice as often."""
        lengths: Lengths = "128:6,256:2,512:2,1024,2048"
        """Tokens of a prompt with its answer, LENGTH or LENGTH:PARTS with commas between. They come one after another,
        each for its parts of train.max_steps. As many prompts as fit share a row of data.seq_len tokens."""

    settings: Settings

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        settings = cls.Settings.model_validate(config.section(cls.name))
        need(
            max(stages(settings.lengths)) <= config.data.seq_len,
            "ruler.lengths",
            settings.lengths,
            f"each at most data.seq_len={config.data.seq_len}, the tokens of a row",
        )
        kind = config.data.tokenizer.kind
        need(kind != "nucleotides", "data.tokenizer.kind", kind, f"not with task={cls.name}, which asks in English")

    def open(self) -> TaskData:
        found, kinds = super().open(), self.settings.tasks
        assert self.tokenizer
        every = stages(self.settings.lengths)
        train = {n: RulerPrompts(self.tokenizer, found.train, kinds, n) for n in every}
        validation = RulerPrompts(self.tokenizer, found.validation, kinds, every[-1])
        for prompts in train.values():
            for index in range(32):  # a length that holds no prompt is refused now, not in its stage
                prompts.sample(self.seed, index)
        length = self.config.data.seq_len
        return TaskData(
            PackedQuestions(lambda position: train[at_stage(every, position, self.config)], length, self.seed),
            PackedQuestions(lambda position: validation, length, VALIDATION_SEED),
            found.identity | {"prompts": digest(self.settings.model_dump(mode="json"))}, self._chance_nats(),
        )  # fmt: skip

    def _chance_nats(self) -> float:
        """Loss of a model that knows the answers' form alone, per token."""
        nats = tokens = 0.0
        for kind in self.settings.tasks:
            value = RULER[kind].value
            example = {"numbers": "1234567", "uuids": "00000000-0000-4000-8000-000000000000"}[value]
            assert self.tokenizer
            nats += CHANCE_NATS[value]
            tokens += len(ids_after(self.tokenizer, "is", f" {example}"))
        return nats / tokens
