"""RULER's retrieval tasks: their sentences, and the draws of a sample (Hsieh et al., 2024, arXiv 2404.06654).

Keys are words of the wonderwords package, as in RULER. titans_pt.evaluation.ruler evaluates these tasks and lists the
differences from RULER; titans_pt.tasks.ruler trains on them.
"""

import functools
import math
import uuid
from dataclasses import dataclass
from random import Random
from typing import Literal

from titans_pt.tools.extras import needed

Kind = Literal["words", "numbers", "uuids"]
HEAD = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards."
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {query} mentioned in the provided text {are}"
DEPTHS = [round(i * 100 / 39) for i in range(40)]
"""Depths of needles in essays that RULER draws from: percent of the sentences before the needle."""
NUMBERS = range(1_000_000, 10_000_000)
CHANCE_NATS = {"numbers": math.log(len(NUMBERS)), "uuids": 122 * math.log(2)}
"""Loss in nats on a value, for a model that knows the value's form alone."""


@dataclass(frozen=True)
class NeedleTask:
    """A retrieval task with ``keys`` keys of ``values`` values each; ``queries`` of the keys are asked."""

    haystack: Literal["noise", "essays", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def single(self) -> bool:
        """Whether the question has one answer, at one place."""
        return self.values * self.queries == 1

    @property
    def words(self) -> dict[str, str]:
        if self.single:
            return {"some": "A", "are": "is", "are_all": "is", "kind": self.value[:-1]}
        return {"some": "Some", "are": "are", "are_all": "are all", "kind": self.value}


TASKS = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("essays"),
    "niah_single_3": NeedleTask("essays", value="uuids"),
    "niah_multikey_1": NeedleTask("essays", keys=4),
    "niah_multikey_2": NeedleTask("needles"),
    "niah_multikey_3": NeedleTask("needles", key="uuids", value="uuids"),
    "niah_multivalue": NeedleTask("essays", values=4),
    "niah_multiquery": NeedleTask("essays", keys=4, queries=4),
}


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    """Adjectives and nouns. Every pair is a key; their product, 6 million strings, is not built."""
    with needed("RULER's keys"):
        from wonderwords import RandomWord

    words = RandomWord().parts_of_speech
    return sorted(set(words["adjective"])), sorted(set(words["noun"]))


def draw(kind: Kind, random: Random) -> str:
    if kind == "numbers":
        return str(random.choice(NUMBERS))
    if kind == "uuids":
        return str(uuid.UUID(int=random.getrandbits(128), version=4))
    return "-".join(random.choice(words) for words in _words())


@dataclass(frozen=True)
class Draw:
    """The random part of a sample."""

    told: list[tuple[str, str]]
    """(key, value) of each needle, in the order of their places. Keys differ unless a key has several values."""
    places: list[float]
    """Percent of the sentences (essays, ascending) or lines that come before each needle."""
    asked: list[str]
    """Keys that are asked for."""

    @property
    def expected(self) -> list[str]:
        return [value for asked in self.asked for key, value in self.told if key == asked]


def draw_sample(task: NeedleTask, depth: float | None, random: Random) -> Draw:
    """Draw a sample with the asked needle at ``depth``. The places of other needles, or of all if ``depth`` is None,
    are drawn as in the protocol."""
    keys: list[str] = []
    while len(keys) < task.keys:
        if (key := draw(task.key, random)) not in keys:
            keys.append(key)
    asked = random.sample(keys, task.queries)
    told = [(key, draw(task.value, random)) for key in keys for _ in range(task.values)]
    random.shuffle(told)
    if task.haystack == "essays":
        places = [float(p) for p in random.sample(DEPTHS, len(told))]
    else:
        places = [100 * random.random() for _ in told]
    if depth is not None:
        places[next(i for i, (key, _) in enumerate(told) if key == asked[0])] = depth
    order = sorted(range(len(told)), key=lambda i: places[i])
    return Draw([told[i] for i in order], [places[i] for i in order], asked)


def query(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def question_of(task: NeedleTask, keys: list[str]) -> str:
    """The end of a prompt: the question, and the beginning of its answer."""
    words, asked = task.words, query(keys)
    return "\n" + QUESTION.format(query=asked, **words) + PREFIX.format(query=asked, **words)


def needle_of(task: NeedleTask, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value, key=key, value=value)
