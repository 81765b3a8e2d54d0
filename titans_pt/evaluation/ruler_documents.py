"""Documents to train on for RULER's needles: a question about a short text, and its answer.

The words are those of :mod:`titans_pt.evaluation.ruler`; keys, values, places, lengths and texts are drawn. The essays
of the evaluation are not among the texts: it hides its needles in texts that training never saw.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from titans_pt.data_pipeline import stdlib
from titans_pt.errors import UserError
from titans_pt.evaluation.haystack import Haystack, prompt_text
from titans_pt.evaluation.ruler import arrange, essays, words_of
from titans_pt.tasks.ruler_words import NOISE, TASKS, draw_sample
from titans_pt.tools.files import write_atomically

ALLOWED = tuple(name for name, task in TASKS.items() if task.single and task.haystack != "needles")


def write_documents(
    path: Path, tasks: Sequence[str], count: int, words: tuple[int, int], texts: str | None = None, seed: int = 0
):
    """Write ``count`` documents as JSONL, with the tasks in turn.

    Args:
        tasks: names from ALLOWED.
        words: the fewest and the most words of a haystack. The logarithm of their number is drawn uniformly: half of
            the documents are shorter than the geometric mean.
        texts: folder of .txt files, the haystacks of tasks in essays; None: the documentation that ships with Python.

    Raises:
        UserError: an unknown task, fewest words above most words, no texts, or fewer words in them than in a haystack.
    """
    for task in tasks:
        if task not in ALLOWED:
            raise UserError(f"--tasks: given {task!r}; allowed: {', '.join(ALLOWED)}")
    tasks = list(dict.fromkeys(tasks))
    least, most = words
    if least > most:
        raise UserError(f"--words: given {least},{most}; write the fewest and the most words of a haystack")
    text = essays(texts) if texts else "\n\n".join(text for _, text in stdlib.read())
    found = text.split()
    if len(found) < most:
        raise UserError(f"--words: given {least},{most}; the texts have {len(found)} words")

    def write(temporary: Path):
        with temporary.open("w", encoding="utf-8") as file:
            for document in documents(tasks, count, words, found, seed):
                file.write(json.dumps(document) + "\n")

    write_atomically(path, write)
    print(f"{count:,} documents: {path}", flush=True)


def documents(
    tasks: Sequence[str], count: int, words: tuple[int, int], text: list[str], seed: int
) -> Iterator[dict[str, str]]:
    """Yield documents with ``text`` and ``task``; document n depends on n and the other arguments, not on ``count``."""
    for n in range(count):
        name, random = tasks[n % len(tasks)], Random(f"{seed} {n}")
        size = round(math.exp(random.uniform(math.log(words[0]), math.log(words[1]))))
        if TASKS[name].haystack == "noise":
            haystack = Haystack(None, [NOISE], "\n")
            units = max(1, size // len(NOISE.split()))
        else:
            begin = random.randrange(len(text) - size + 1)
            haystack = words_of(None, " ".join(text[begin : begin + size]))
            units = len(haystack.units)
        drawn = draw_sample(TASKS[name], None, random)
        asked = prompt_text(arrange(TASKS[name], drawn, haystack, units), haystack)
        yield {"text": f"{asked} {drawn.expected[0]}.", "task": name}
