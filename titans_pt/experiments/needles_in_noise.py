"""What Titans are for: needles shown once in noise, asked for far outside the attention window and the training length.

    noise .. MARK k3 v3 .. noise .. MARK k1 v1 .. noise .. | ASK k1 v1 ASK k3 v3 ...
        needles at uniform places among random noise              the questions, in a random order

Small models learn it at short lengths, the shortest first, and are asked at lengths up to hundreds of times longer, in
constant memory. A sliding-window Transformer of equal size is the control: it cannot see a needle once it is further
back than its layers' windows reach together.

One process trains one model after the other. A finished model is one file of one record in ``run.dir``: it is skipped
when the command runs again.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, config_hash
from titans_pt.errors import UserError
from titans_pt.experiments.study import EVALUATION_SEED, REPORT_EVERY, Samples, answers, fit, newest, once
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS
from titans_pt.models.mixers.common import MemoryMixer
from titans_pt.tools.files import write_text
from titans_pt.tools.plots import plot_accuracy
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import wilson

MARK, ASK = 0, 1
ANSWERS = 256
"""Questions asked at each length."""
ROWS = 8
"""Samples read at once."""


@dataclass(frozen=True)
class NeedlesInNoise(Samples):
    """A quarter of the vocabulary are keys, a quarter values, the rest is noise, but for the two signs."""

    vocabulary: int = 256
    length: int = 1024
    needles: int = 4

    def __post_init__(self):
        if self.vocabulary < 8:
            raise UserError(f"model.vocab_size: given {self.vocabulary}; signs, keys, values and noise need at least 8")
        if self.needles > self.vocabulary // 4 or self.length < 6 * self.needles:
            raise UserError(
                f"--needles: given {self.needles}; model.vocab_size={self.vocabulary} has {self.vocabulary // 4} keys, "
                f"and {self.length} tokens hold at most {self.length // 6}"
            )

    @property
    def tail(self) -> int:
        """Tokens of the questions and their answers, at the end."""
        return 3 * self.needles

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary // 4)

    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64 and the places (needles,) of the asked keys, ascending; the answer follows each.

        Equal arguments give equal samples, whatever was drawn before.
        """
        draw = np.random.default_rng([seed, index])
        quarter = self.vocabulary // 4
        keys = quarter + draw.choice(quarter, self.needles, replace=False)
        values = 2 * quarter + draw.choice(quarter, self.needles, replace=False)
        noise = np.concatenate([np.arange(2, quarter), np.arange(3 * quarter, self.vocabulary)])
        ids = draw.choice(noise, self.length)
        end = self.length - self.tail
        # Three tokens each at random places: choose among the places left when each is one token wide.
        free = end - 2 * self.needles
        places = np.sort(draw.choice(free, self.needles, replace=False)) + 2 * np.arange(self.needles)
        ids[places], ids[places + 1], ids[places + 2] = MARK, keys, values
        order = draw.permutation(self.needles)
        asked = end + 3 * np.arange(self.needles)
        ids[asked], ids[asked + 1], ids[asked + 2] = ASK, keys[order], values[order]
        return ids, asked + 1


@dataclass(frozen=True)
class Curriculum:
    """Lengths of training, one after the other, and how many parts of the steps each gets.

    Args:
        text: LENGTH or LENGTH:PARTS, with commas between.

    Raises:
        UserError: ``text`` is something else.
    """

    text: str

    def __post_init__(self):
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?(,[1-9]\d*(:[1-9]\d*)?)*", self.text):
            raise UserError(f"--lengths: given {self.text!r}; write LENGTH or LENGTH:PARTS, with commas between")

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(length, parts)."""
        pairs = [word.split(":") for word in self.text.split(",")]
        return [(int(pair[0]), int(pair[1]) if len(pair) == 2 else 1) for pair in pairs]

    @property
    def lengths(self) -> list[int]:
        return [length for length, _ in self.stages]

    def length(self, step: int, steps: int) -> int:
        """Of the samples of step 0 <= ``step`` < ``steps``."""
        every = [length for length, parts in self.stages for _ in range(parts)]
        return every[step * len(every) // steps]

    def last_begins(self, steps: int) -> int:
        """The first step of the last length."""
        total = sum(parts for _, parts in self.stages)
        return -(-steps * (total - self.stages[-1][1]) // total)


def train_and_ask(
    config: Config, models: Sequence[str], task: NeedlesInNoise, curriculum: Curriculum, asked: Sequence[int]
):
    """Trains what is not there yet, then writes needles.md and needles.png of all in ``run.dir``.

    Args:
        models: mixers by name.
        curriculum: of training; ``task.length`` is not used.
        asked: lengths of evaluation.

    Raises:
        UserError: an unknown model, a batch that does not hold one sample, a length that does not hold the needles.
    """
    for model in models:
        if model not in MIXERS.names():
            raise UserError(f"--models: given {model!r}; allowed: {', '.join(MIXERS.names())}")
    for length in asked:
        replace(task, length=length)  # refuses what it cannot hold, before any training
    longest = max(curriculum.lengths)
    if config.train.batch_tokens < longest:
        raise UserError(f"train.batch_tokens: given {config.train.batch_tokens}; a sample has {longest} tokens")
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        settings = sized(config.model, model)
        said = config.run.seed, vars(task), curriculum.text, asked
        key = digest(config_hash(settings), config_hash(config.train), *said)
        make = partial(train, config, model, settings, task, curriculum, asked)
        once(folder / f"{model}.jsonl", key, model.upper(), make)
    summarise(folder)


def sized(base: ModelConfig, model: str) -> ModelConfig:
    """``base`` with one mixer; one without a memory gets MLPs so wide that none with a memory has more parameters."""
    settings = ModelConfig(**(base.model_dump() | {"mixers": [model]}))
    if issubclass(MIXERS.find(model), MemoryMixer):
        return settings
    others = (name for name in MIXERS.names() if issubclass(MIXERS.find(name), MemoryMixer))
    missing = max(parameters(sized(base, other)) for other in others) - parameters(settings)
    wider = settings.hidden + max(0, -(-missing // (3 * settings.d_model * settings.n_layers)))
    return settings.model_copy(update={"mlp_hidden": wider})


def parameters(settings: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(settings).parameters())


def train(
    config: Config, model: str, settings: ModelConfig, task: NeedlesInNoise, curriculum: Curriculum,
    asked: Sequence[int],
) -> dict:
    """One model's record: its settings, its curve, its accuracy by length."""
    torch.manual_seed(config.run.seed)
    built, steps = build_model(settings), config.train.max_steps

    def batch(i: int) -> tuple[Tensor, Tensor]:
        length = curriculum.length(i, steps)
        rows = config.train.batch_tokens // length
        return replace(task, length=length).batch(config.run.seed, i * rows, rows)

    fitted = fit(built, config.train, batch, model.upper(), curriculum.last_begins(steps) + REPORT_EVERY)
    by_length = [ask(built, replace(task, length=n), config.evaluation.prefill_tokens) for n in asked]
    return {
        "model": model, **fitted, "by_length": by_length, "chance": task.chance, "task": vars(task),
        "trained_at": curriculum.lengths, "parameters": sum(p.numel() for p in built.parameters()),
        "settings": settings.model_dump(),
    }  # fmt: skip


@torch.no_grad()
def ask(model: nn.Module, task: NeedlesInNoise, chunk_tokens: int, count: int = ANSWERS) -> dict:
    """Accuracy at ``task.length`` on samples that training does not see, ROWS at a time, in constant memory."""
    hits, total, began = 0, 0, time.perf_counter()
    for first in range(0, -(-count // task.needles), ROWS):
        ids, places = task.batch(EVALUATION_SEED, first, min(ROWS, -(-count // task.needles) - first))
        state, end = None, task.length - task.tail
        for piece in ids[:, :end].split(chunk_tokens, dim=1):
            _, state = model(piece, state, last_only=True)
        right = answers(model, ids[:, end:], places - end, state)[1]
        hits, total = hits + int(right.sum()), total + right.numel()
    low, high = wilson(hits, total)
    row = {"length": task.length, "mean": hits / total, "n": total, "low": low, "high": high}
    seconds = time.perf_counter() - began
    print(f"  {task.length:,} tokens: {100 * row['mean']:.1f} % of {total}, {seconds:.0f} s", flush=True)
    return row | {"seconds": seconds}


def summarise(folder: Path):
    """needles.md and needles.png in ``folder``, of all models that have finished there; the newest record counts."""
    records = newest(folder)
    records.sort(key=lambda r: r["model"])
    write_text(folder / "needles.md", table(records))
    trained = "/".join(f"{n:,}" for n in records[0]["trained_at"])
    title = f"Needles in noise: trained at {trained} tokens, window {records[0]['settings']['window']}"
    plot_accuracy({r["model"].upper(): r["by_length"] for r in records}, folder / "needles.png", title)
    print(table(records), end="")
    print(f"{folder / 'needles.md'}, {folder / 'needles.png'}")


def table(records: list[dict]) -> str:
    """Markdown, one line a model: accuracy in percent by length."""
    lengths = sorted({row["length"] for r in records for row in r["by_length"]})
    lines = [
        "| model | parameters | steps | " + " | ".join(f"{n:,}" for n in lengths) + " |",
        "|---" * (3 + len(lengths)) + "|",
    ]
    for r in records:
        found = {row["length"]: f"{100 * row['mean']:.1f}" for row in r["by_length"]}
        cells = [r["model"].upper(), f"{r['parameters']:,}", f"{r['steps']:,}", *(found.get(n, "-") for n in lengths)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
