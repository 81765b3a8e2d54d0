"""Common parts of evaluations that ask about long texts: reading, answering, the record, the summary, the pictures."""

import json
import logging
import math
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import BabilongConfig, Config, NeedleConfig
from titans_pt.errors import UserError
from titans_pt.evaluation.caching import read_prompt
from titans_pt.evaluation.haystack import TooShort
from titans_pt.evaluation.plots import plot_cost, plot_heat
from titans_pt.layers.state import state_bytes
from titans_pt.runs.loaded import LoadedRun
from titans_pt.runs.states import load_state, read_about, save_state
from titans_pt.streaming import continuation_logits, device_of, greedy
from titans_pt.tools.plots import plot_accuracy
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import wilson

log = logging.getLogger(__name__)

CHECKED_TOKENS = 2048
"""Samples of fewer tokens are all drawn before the first is read: the longest of their prompts may not fit."""


@dataclass(frozen=True)
class Sample:
    """A prompt of T = len(ids) tokens, and the strings that its answer must contain."""

    ids: Tensor
    """(T,) integers, on the CPU."""
    expected: list[str]
    answer_ids: list[int] | None
    """Tokens of the right answer after the prompt; None if several answers are right."""
    chance_nats: float
    """Loss in nats of a model that knows the kind of answer, but not which answer is right."""
    log: dict[str, Any] = field(default_factory=dict)
    """Further entries of the record."""


def answer_nll(model: nn.Module, last_logits: Tensor, state: Any, answer_ids: list[int]) -> float:
    """Mean negative log-likelihood (nats per token) of the answer after a prompt."""
    logits = continuation_logits(model, last_logits, state, answer_ids)
    return float(F.cross_entropy(logits.float(), torch.tensor(answer_ids, device=logits.device)))


class PromptReading(NamedTuple):
    """The result of reading prompts: the last logits (B, V), the state after them, and speed and memory."""

    logits: Tensor
    state: Any
    stretches: list[dict]
    """A row for each stretch of ``save_every`` tokens: tokens read so far, tokens_per_s (of one row), peak_memory so
    far (bytes)."""


def read(
    model: nn.Module,
    ids: Tensor,
    chunk_tokens: int,
    save_every: int,
    path: Path,
    show: Callable[[dict], None] = lambda stretch: None,
    last: int | None = None,
) -> PromptReading:
    """Read prompts with :func:`prefill` in stretches; save the state in ``path`` after each stretch but the last.

    A killed process continues from the saved state when it is started again with the same arguments; ``path`` must
    identify model and prompts. The file is deleted when the prompts have been read.

    Args:
        ids: (B, T) integers.
        save_every: tokens of a stretch, per row.
        show: called after each stretch with its entry in ``stretches``.
        last: tokens at the end that read caches (evaluation.caching.last); None: all.
    """
    device = device_of(model)
    state, about = killed_reading(path, device)
    stretches = json.loads(about.get("stretches", "[]"))
    done = stretches[-1]["tokens"] if stretches else 0
    end = ids.shape[1]
    for start in range(done, end, save_every):
        stop, began = min(start + save_every, end), _now(device)
        reading = None if last is None else max(last - (end - stop), 0)
        logits, state = read_prompt(model, ids[:, start:stop], chunk_tokens, state, last=reading)
        rate = (stop - start) / (_now(device) - began)
        stretches.append({"tokens": stop, "tokens_per_s": rate, "peak_memory": _peak_memory(device)})
        show(stretches[-1])
        if stop < end:
            save_state(state, path, {"kind": "reading", "stretches": json.dumps(stretches)})
    path.unlink(missing_ok=True)
    return PromptReading(logits, state, stretches)


def killed_reading(path: Path, device: torch.device) -> tuple[Any, dict[str, str]]:
    """State and ``about`` that a killed reading left in ``path``; None and {} if there is no file or a damaged one."""
    if path.exists():
        try:
            return load_state(path, device), read_about(path)
        except UserError as error:  # our own file, and all that is lost is time
            log.warning("%s; everything is read again from the first token", str(error).rpartition(";")[0] or error)
    return None, {}


class LongContext(ABC):
    """One record per sample, shortest first. A job is (task, length, depth, index); see the subclasses."""

    name: str
    has_prompts = True
    settings: NeedleConfig | BabilongConfig

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.tokenizer, self.settings = run, run.tokenizer, getattr(config.evaluation, self.name)
        self.prefill_tokens, self.save_every = config.evaluation.prefill_tokens, config.evaluation.save_every
        tasks: list[str] = list(self.settings.tasks)
        self.jobs = sorted(self._jobs(), key=lambda job: (job[1], tasks.index(job[0])))
        # Earlier versions left out a tokenizer's begin tokens: with begin tokens, their records are of other prompts.
        self.keys = [digest(self.identity(*job), run.identity, *self.tokenizer.begin) for job in self.jobs]
        self._check_samples()

    def _check_samples(self):
        """Draws some samples before any is read.

        Raises:
            UserError: a length is too short for one of them, or a text is missing.
        """
        first = {job[0]: job for job in reversed(self.jobs)}.values()
        for job in dict.fromkeys((*first, *(job for job in self.jobs if job[1] < CHECKED_TOKENS))):
            if self._lacking(*job):
                length = needed = job[1]
                same = [job for job in self.jobs if job[1] == length]
                while more := max(self._lacking(task, needed, depth, index) for task, _, depth, index in same):
                    needed += more  # another length draws other prompts, some of them longer
                raise UserError(f"evaluation.{self.name}.lengths: given {length}; with this tokenizer prompts without "
                                f"a haystack need {needed}, room for the answer included")  # fmt: skip

    def _lacking(self, task: str, length: int, depth: float | None, index: int) -> int:
        """Tokens by which ``length`` is too short for a sample."""
        try:
            self.sample(task, length, depth, index)
        except TooShort as error:
            return error.lacking
        return 0

    @abstractmethod
    def _jobs(self) -> Iterable[tuple[str, int, float | None, int]]: ...

    @abstractmethod
    def identity(self, task: str, length: int, depth: float | None, index: int) -> str:
        """Hash of everything that determines the sample."""

    @abstractmethod
    def sample(self, task: str, length: int, depth: float | None, index: int) -> Sample: ...

    @abstractmethod
    def score(self, task: str, sample: Sample, prediction: str) -> dict[str, float]:
        """``score``, from 0 to 1, and other scores by name."""

    def measure(self, index: int) -> dict:
        """Read sample ``index`` and answer it greedily; continue the reading of a long sample that was killed.

        ``answer_nll``, nats per token of the right answer, is the finer figure for models that never score.
        ``chance_nll`` is the same for a model that knows the form of the answers, but not the right one.
        ``peak_memory`` is in bytes: on CUDA the peak of this sample's tensors, on a CPU that of the process so far.
        """
        task, length, depth, number = self.jobs[index]
        run, new = self.loaded, self.settings.max_new_tokens
        sample = self.sample(task, length, depth, number)
        device = device_of(run.model)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        kept = run.results.reading(self.keys[index])
        logits, state, stretches = read(
            run.model, sample.ids[None], self.prefill_tokens, self.save_every, kept, last=run.read_last
        )
        nll = chance = None
        if sample.answer_ids is not None:
            nll = answer_nll(run.model, logits, state, sample.answer_ids)
            chance = sample.chance_nats / len(sample.answer_ids)
        size, between = state_bytes(state), _now(device)
        answer = list(greedy(run.model, logits, state, new, {self.tokenizer.eos_id}))
        wrote = _now(device)
        prediction = self.tokenizer.decode(answer)
        return {
            "task": task,
            "length": length,
            "depth": depth,
            "index": number,
            "tokens": len(sample.ids),
            **sample.log,
            "prediction": prediction,
            "expected": sample.expected,
            **self.score(task, sample, prediction),
            "answer_nll": nll,
            "chance_nll": chance,
            "prefill_tokens_per_s": len(sample.ids) / _seconds(stretches),
            "decode_tokens_per_s": len(answer) / (wrote - between) if answer else None,
            "peak_memory": _peak_memory(device),
            "state_bytes": size,
            "stretches": stretches,
        }

    def summary(self, records: list[dict]) -> dict:
        """Accuracy of each task with its Wilson 95 % interval: over all, by length, and by length and depth."""
        tasks = {}
        for task in self.settings.tasks:
            of_task = [r for r in records if r["task"] == task]
            by_length, cells = [], []
            for length in sorted({r["length"] for r in of_task}):
                part = [r for r in of_task if r["length"] == length]
                rates = {name: mean(part, name) for name in ("tokens", "prefill_tokens_per_s", "decode_tokens_per_s")}
                peaks = {name: max(r[name] for r in part) for name in ("peak_memory", "state_bytes")}
                by_length.append({"length": length, **self._scores(part), **rates, **peaks})
                for depth in sorted(d for d in {_depth(r) for r in part} if d is not None):
                    cell = [r for r in part if _depth(r) == depth]
                    cells.append({"length": length, "depth": depth, **self._scores(cell)})
            tasks[task] = {**self._scores(of_task), "by_length": by_length, "cells": cells}
        return {"tasks": tasks}

    def _scores(self, records: list[dict]) -> dict:
        hits = math.fsum(r["score"] for r in records)
        low, high = wilson(hits, len(records))
        others = sorted(name for name in records[0] if name.startswith("score_"))
        return {
            "mean": hits / len(records),
            "n": len(records),
            "low": low,
            "high": high,
            **{name: mean(records, name) for name in (*others, "answer_nll", "chance_nll")},
        }

    def table(self, summary: dict) -> str:
        tasks = summary["tasks"]
        lengths = sorted({row["length"] for figures in tasks.values() for row in figures["by_length"]})
        width = max(len(task) for task in tasks)
        lines = [
            f"{self.name}: accuracy % [Wilson 95 %] n, by task and length",
            f"  {'':{width}} " + " ".join(f"{length:>16,}" for length in lengths),
        ]
        for task, figures in tasks.items():
            lines.append(f"  {task:{width}} " + " ".join(f"{_figures(row):>16}" for row in figures["by_length"]))
        lines.append(
            f"  {'':{width}} {'length':>10} {'nll/token':>10} {'chance':>8} {'prefill t/s':>12} {'decode t/s':>11} "
            f"{'peak MiB':>9} {'state MiB':>10}"
        )
        for task, figures in tasks.items():
            for row in figures["by_length"]:
                lines.append(
                    f"  {task:{width}} {row['length']:>10} {_or_dash(row['answer_nll'], '.3f'):>10} "
                    f"{_or_dash(row['chance_nll'], '.3f'):>8} {row['prefill_tokens_per_s']:>12.1f} "
                    f"{_or_dash(row['decode_tokens_per_s'], '.1f'):>11} {row['peak_memory'] / 2**20:>9.1f} "
                    f"{row['state_bytes'] / 2**20:>10.2f}"
                )
        return "\n".join(lines)

    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        """Plot accuracy and cost against length, and a heat map by depth for each task with depths."""
        tasks = summary["tasks"]
        lines = {task: figures["by_length"] for task, figures in tasks.items()}
        heat = [
            plot_heat(figures["cells"], folder / f"{self.name}-{task}.png", f"{task}\n{title}")
            for task, figures in tasks.items()
            if figures["cells"]
        ]
        return [
            plot_accuracy(lines, folder / f"{self.name}.png", f"{self.name}\n{title}"),
            plot_cost(lines, folder / f"{self.name}-cost.png", f"{self.name}: cost of a sample\n{title}"),
            *heat,
        ]


def _seconds(stretches: list[dict]) -> float:
    begins = [0, *(row["tokens"] for row in stretches)]
    return sum((row["tokens"] - begin) / row["tokens_per_s"] for row, begin in zip(stretches, begins, strict=False))


def _depth(record: dict) -> float | None:
    """Row of the heat map: a requested depth as given, a drawn depth rounded to ten percent."""
    depth = record["depth"]
    return round(record["depth_drawn"], -1) if depth is None and record.get("depth_drawn") is not None else depth


def mean(records: list[dict], name: str) -> float | None:
    values = [r[name] for r in records if r[name] is not None]
    return math.fsum(values) / len(values) if values else None


def _figures(row: dict) -> str:
    return f"{100 * row['mean']:.0f} [{100 * row['low']:.0f}, {100 * row['high']:.0f}] {row['n']}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
