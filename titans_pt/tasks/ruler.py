"""RULER's needles in text, trained by their answers alone (titans_pt.tasks.in_text). The sentences are RULER's; the
text comes from the run's token files, or is RULER's noise."""

from functools import cached_property
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from titans_pt.data_pipeline.tokenizers import ids_after
from titans_pt.tasks.base import TASKS, Samples
from titans_pt.tasks.in_text import InText, Parts, PromptsInText
from titans_pt.tasks.ruler_words import CHANCE_NATS, HEAD, NOISE, draw_sample, needle_of, question_of
from titans_pt.tasks.ruler_words import TASKS as RULER

Kind = Literal["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"]


class RulerPrompts(PromptsInText):
    """Prompts that hide RULER's needles in a text. kinds: names of RULER's tasks."""

    def parts(self, kind: str, random: Random) -> Parts:
        task = RULER[kind]
        drawn = draw_sample(task, None, random)
        separator, tail = "\n" if task.haystack == "noise" else " ", question_of(task, drawn.asked)
        needles = [ids_after(self.tokenizer, "a", separator + needle_of(task, *told)) for told in drawn.told]
        begin = self.tokenizer.document(HEAD.format(**task.words) + "\n")
        (expected,) = drawn.expected
        end, answer = ids_after(self.tokenizer, "a", tail), ids_after(self.tokenizer, tail, f" {expected}")
        return Parts(begin, needles, (end, answer))

    def text_of(self, kind: str, count: int, random: Random) -> list[int]:
        if RULER[kind].haystack != "noise":
            return super().text_of(kind, count, random)
        return (self._noise * (count // len(self._noise) + 1))[:count]

    @cached_property
    def _noise(self) -> list[int]:
        return ids_after(self.tokenizer, "a", "\n" + NOISE)


@TASKS.register
class Ruler(InText):
    """Answer a question about a long text that states the answer once."""

    name = "ruler"

    class Settings(InText.Settings):
        tasks: Annotated[list[Kind], Field(min_length=1)] = ["niah_single_1", "niah_single_2"]
        """RULER's tasks, drawn with equal probability: niah_single_1 (in noise), niah_single_2 (in text), niah_single_3
        (uuids), niah_multikey_1 (four keys, of which one is asked). A task listed twice is drawn twice as often."""

    settings: Settings

    def prompts(self, text: Samples, length: int, training: bool) -> RulerPrompts:
        assert self.tokenizer
        return RulerPrompts(self.tokenizer, text, self.settings.tasks, length, "ruler.lengths")

    def chance_nats(self) -> float:
        nats = tokens = 0.0
        for kind in self.settings.tasks:
            value = RULER[kind].value
            example = {"numbers": "1234567", "uuids": "00000000-0000-4000-8000-000000000000"}[value]
            assert self.tokenizer
            nats += CHANCE_NATS[value]
            tokens += len(ids_after(self.tokenizer, "is", f" {example}"))
        return nats / tokens
