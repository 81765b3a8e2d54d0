"""BABILong: a story's facts strewn over a long text, and a question about them (Kuratov et al., NeurIPS 2024).

Facts keep their order at uniform places between sentences of a text. The prompt's words, the 20 new tokens and the
score are the benchmark's. Two things differ: the stories are ours (titans_pt.tasks.babi), and
evaluation.babilong.haystack names the text. Results are BABILong's only with PG19's books; every record names its text.
The prompt is filled with whole sentences, counted in the model's own tokens; a text that is too short repeats.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random

from titans_pt.config import BabilongConfig, SourceConfig
from titans_pt.data_pipeline.kinds import Document
from titans_pt.data_pipeline.sources import documents
from titans_pt.data_pipeline.tokenizers import ids_after
from titans_pt.errors import UserError
from titans_pt.evaluation.haystack import Haystack, Part, context, fill
from titans_pt.evaluation.long_context import LongContext, Sample
from titans_pt.evaluation.sentences import sentences
from titans_pt.tasks import babi
from titans_pt.tools.records import digest

SENTENCE_TOKENS = 10
"""Shorter sentences of the text are left out."""


@dataclass(frozen=True)
class Wording:
    """The benchmark's words for one task, with its misprints. examples: (facts, question, answer). between: stands
    between two examples."""

    instruction: str
    examples: list[tuple[str, str, str]]
    post_prompt: str
    between: str = "\n"


_QUESTION = "hidden in some random text and a question."
_ONLY = "You need to answer the question based only on the information from the facts."
_CARRIED = (
    f"{_ONLY}\nIf a person got an item in the first location and travelled to the second location the item is also in "
    "the second location. If a person dropped an item in the first location and moved to the second location the item "
    "remains in the first location."
)
WORDINGS = {
    "qa1": Wording(
        f"I will give you context with the facts about positions of different persons {_QUESTION} {_ONLY} If a person "
        "was in different locations, use the latest location to answer the question.",
        [
            ("Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony.",
             "Where is Charlie?", "The most recent location of Charlie is balcony."),
            ("Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to balcony.",
             "Where is Alan?", "The most recent location of Alan is shop."),
        ],
        "Always return your answer in the following format: The most recent location of \u2019person\u2019 is "
        "\u2019location\u2019. Do not write anything else after that.",
        between="\n\n",
    ),
    "qa2": Wording(
        f"I give you context with the facts about locations and actions of different persons {_QUESTION}{_CARRIED}",
        [
            ("Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony.",
             "Where is the bottle?", "The bottle is in the balcony."),
            ("Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen.",
             "Where is the screw driver?", "The screw driver is in the kitchen."),
        ],
        "Always return your answer in the following format: The \u2019item\u2019 is in \u2019location\u2019. "
        "Do not write anything else after that.",
    ),
    "qa3": Wording(
        f"I give you context with the facts about locations and actions of different persons {_QUESTION} {_CARRIED}",
        [
            ("John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel journeyed "
             "to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen.",
             "Where was the apple before the kitchen?", "Before the kitchen the apple was in the bathroom."),
            ("John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra took "
             "the football. Sandra travelled to the garden. Sandra journeyed to the bedroom.",
             "Where was the football before the bedroom?", "Before the bedroom the football was in the garden."),
        ],
        "Always return your answer in the following format: Before the $location_1$ the $item$ was in the $location_2$."
        " Do not write anything else after that.",
    ),
    "qa4": Wording(
        f"I will give you context with the facts about different people, their location and actions, {_QUESTION} "
        f"{_ONLY}",
        [
            ("The hallway is south of the kitchen. The bedroom is north of the kitchen.",
             "What is the kitchen south of?", "bedroom"),
            ("The garden is west of the bedroom. The bedroom is west of the kitchen.",
             "What is west of the bedroom?", "garden"),
        ],
        "Your answer should contain only one word - location. Do not write anything else after that.",
    ),
    "qa5": Wording(
        f"I will give you context with the facts about locations and their relations {_QUESTION} {_ONLY}",
        [
            ("Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the bedroom. Bill took the "
             "milk there.", "Who did Mary give the apple to?", "Fred"),
            ("Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk there. Bill travelled "
             "to the bedroom.", "Who gave the football?", "Jeff"),
            ("Fred picked up the apple there. Fred handed the apple to Bill. Bill journeyed to the bedroom. Jeff went "
             "back to the garden.", "What did Fred give to Bill?", "apple"),
        ],
        "Your answer should contain only one word. Do not write anything else after that. Do not explain your answer.",
    ),
}  # fmt: skip


def frame(task: str, story: babi.Story, wording: str, shots: int) -> tuple[str, str]:
    """Prompt before and after the text: ``instructions`` as in the benchmark, ``plain`` as in fine-tuning."""
    if wording == "plain":
        return "", babi.asked(story.question)
    words = WORDINGS[task]
    examples = words.between.join(
        f"<example>\n{facts} {asked}\nAnswer: {answer}\n</example>" for facts, asked, answer in words.examples[:shots]
    )
    head = f"{words.instruction}\n\n{examples}\n\n{words.post_prompt}"
    return f"{head}\n\n<context>\n", f"\n</context>\n\nQuestion: {story.question}"


def book_sentences(tokenizer, source: SourceConfig, characters: int) -> list[str]:
    """The sentences of at least SENTENCE_TOKENS tokens in the first ``characters`` of a text, white space folded.

    Raises:
        UserError: there are none, or the text is missing.
    """
    found: list[str] = []
    if source.kind == "files" and source.separator is None:  # data.sources would cut paragraphs within a sentence
        source = source.model_copy(update={"separator": ""})
    for document in _named_here(documents(source)):
        text = " ".join(document.text[:characters].split())
        found += [s for s in sentences(text) if len(tokenizer.encode(s)) >= SENTENCE_TOKENS]
        characters -= len(document.text)
        if characters <= 0:
            break
    if not found:
        raise UserError(
            f"evaluation.babilong.haystack: {source.path or source.kind}: no sentence of {SENTENCE_TOKENS} tokens; "
            "name a longer text"
        )
    return found


def _named_here(text: Iterator[Document]) -> Iterator[Document]:
    """Yield from ``text``; errors name the setting of the haystack in place of data.sources."""
    try:
        yield from text
    except UserError as error:
        raise UserError(str(error).replace("data.sources", "evaluation.babilong.haystack", 1)) from None


def clean(prediction: str) -> str:
    """The first sentence of an answer, in lower case."""
    answer = prediction.lower().split(".")[0]
    return answer.split("<context>")[0].split("<example>")[0]


def strict_score(task: str, question: str, target: str, prediction: str) -> int:
    """The benchmark's score: 1 if the first sentence has the right answer and no other answer of the task, except those
    in the question; else 0."""
    answer = clean(prediction)
    labels = {label.lower() for label in babi.LABELS[task]}
    found = {label for label in labels if label in answer and label not in question.lower()}
    return int(found == {target.lower()})


class Babilong(LongContext):
    """Suite babilong: lengths x samples of each task."""

    name = "babilong"
    settings: BabilongConfig

    @functools.cached_property
    def haystack(self) -> Haystack:
        s = self.settings
        return Haystack(self.tokenizer, book_sentences(self.tokenizer, s.haystack, s.characters), " ")

    def _jobs(self):
        s = self.settings
        return [
            (task, length, None, i) for task in s.tasks for length in sorted(set(s.lengths)) for i in range(s.samples)
        ]

    def identity(self, task, length, depth, index) -> str:
        s = self.settings
        words = [asdict(WORDINGS[task])] if s.wording == "instructions" else []
        return digest(
            self.name, task, length, index, s.seed, s.max_new_tokens, s.wording, s.shots, self.tokenizer.sha256,
            self.haystack.sha256, *words,
        )  # fmt: skip

    def sample(self, task, length, depth, index) -> Sample:
        """Draw a sample, a pure function of (task, length, index, seed, tokenizer, haystack).

        Raises:
            UserError: not even a prompt without a haystack fits.
        """
        s, random = self.settings, Random(int(self.identity(task, length, depth, index), 16))
        story = babi.story(task, random, babi.most_facts(length))
        start, places = random.randrange(len(self.haystack.units)), sorted(random.random() for _ in story.facts)
        head, tail = frame(task, story, s.wording, s.shots)

        def arrange(units: int) -> list[Part]:
            facts = [(int((units + 1) * place), fact) for place, fact in zip(places, story.facts, strict=True)]
            inside = context(self.haystack, units, facts, lead="", start=start)
            return [*([head] if head else []), *inside, tail]

        filled = fill(self.tokenizer, self.haystack, arrange, length - s.max_new_tokens, "evaluation.babilong.lengths")
        log = {
            "units": filled.units, "facts": len(story.facts), "question": story.question,
            "haystack": s.haystack.path or s.haystack.kind,
        }  # fmt: skip
        answer = ids_after(self.tokenizer, tail, f" {story.answer}") if s.wording == "plain" else None
        return Sample(filled.ids, [story.answer], answer, math.log(len(babi.LABELS[task])), log)

    def score(self, task: str, sample: Sample, prediction: str) -> dict[str, float]:
        """``score`` is the benchmark's; ``score_substring`` is lm-eval's: the answer contains the right word."""
        target, question = sample.expected[0], sample.log["question"]
        return {
            "score": strict_score(task, question, target, prediction),
            "score_substring": int(target.lower() in prediction.lower()),
        }
