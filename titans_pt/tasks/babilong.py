"""BABILong trained by its answers alone (titans_pt.tasks.in_text).

A story's facts stand in a text in the story's order, with questions between and behind them. The wording is that of
fine-tuning, evaluation.babilong.wording=plain.
"""

import math
from functools import cache, partial
from random import Random
from statistics import mean
from typing import Annotated, Any, Literal

from pydantic import Field

from titans_pt.config import Positive
from titans_pt.data_pipeline.tokenizers import Tokenizer, ids_after
from titans_pt.tasks import babi
from titans_pt.tasks.base import TASKS, Samples
from titans_pt.tasks.in_text import Asked, InText, Parts, PromptsInText
from titans_pt.tasks.needles import Lengths

Kind = Literal["qa1", "qa2", "qa3", "qa4", "qa5"]


class StoryPrompts(PromptsInText):
    """Prompts that hide bAbI stories in a text. kinds: names of bAbI's tasks. questions: most questions per story."""

    def __init__(self, tokenizer: Tokenizer, *given: Any, questions: int):
        super().__init__(tokenizer, *given)
        self.questions = questions
        self._ids = cache(partial(ids_after, tokenizer))  # bAbI has a few hundred sentences

    def parts(self, kind: str, random: Random) -> Parts:
        story = babi.story(kind, random, babi.most_facts(self.length))
        facts = [self._ids("a", f" {fact}") for fact in story.facts]
        others = random.sample(story.others, min(self.questions - 1, len(story.others)))
        return Parts(
            self.tokenizer.document(""), facts, self._asked(story.question, story.answer),
            [(told, self._asked(*question)) for told, *question in others],
        )  # fmt: skip

    def _asked(self, question: str, answer: str) -> Asked:
        tail = babi.asked(question)
        return self._ids("a", tail), self._ids(tail, f" {answer}.")  # the score reads an answer up to its full stop


@TASKS.register
class Babilong(InText):
    """The answer to a question about a story whose facts are strewn over a long text."""

    name = "babilong"
    usual = ("babilong",)

    class Settings(InText.Settings):
        tasks: Annotated[list[Kind], Field(min_length=1)] = ["qa1", "qa2", "qa3"]
        """bAbI's tasks, drawn with equal probability. qa1, qa2, qa3 need one, two, three facts; qa4 is about
        directions, qa5 about who gave what to whom. A task listed twice is drawn twice as often."""
        lengths: Lengths = "192:6,256:2,512:2,1024,2048"
        """As ruler.lengths."""
        questions: Positive = 8
        """Most questions about a story in training; fewer if the story has fewer or they do not fit. One stands behind
        the story, the others between its facts, about the facts before them. Questions that follow their facts closely
        are learned first. Validation asks one question, like the evaluation."""

    settings: Settings

    def prompts(self, text: Samples, length: int, training: bool) -> StoryPrompts:
        assert self.tokenizer
        questions = self.settings.questions if training else 1
        return StoryPrompts(
            self.tokenizer, text, self.settings.tasks, length, "babilong.lengths", questions=questions
        )  # fmt: skip

    def chance_nats(self) -> float:
        assert self.tokenizer
        nats = tokens = 0.0
        for kind in self.settings.tasks:
            labels = babi.LABELS[kind]
            nats += math.log(len(labels))
            tokens += mean(len(ids_after(self.tokenizer, "Answer:", f" {label}.")) for label in labels)
        return nats / tokens
