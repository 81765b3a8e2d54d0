"""RULER's single needle in a haystack of noise (S-NIAH-1): find a 7-digit number told once in a long text.

The task and its words are those of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?", 2024 (niah_single_1: noise haystack, word key, number value). What differs, and why:

- Keys are pairs of our own short word lists (titans_pt.evaluation.words), not of the wonderwords package.
- The needle is the line int(n_lines * depth / 100) of a grid of depths, not at a random line: accuracy by depth.
- The haystack is the longest that fits. RULER shrinks in large steps and may stop far below the length.
- A sample depends on nothing but its coordinates, and is built when it is run.
"""

import math
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.evaluation.plots import plot_needle
from titans_pt.evaluation.records import digest, wilson
from titans_pt.evaluation.stream import device_of, greedy, prefill
from titans_pt.evaluation.words import KEYS
from titans_pt.run import LoadedRun
from titans_pt.state import map_tensors, state_bytes

TASK = "niah_single_1"
HEAD = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
TAIL = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
VALUES = range(1_000_000, 10_000_000)
CHANCE_NATS = math.log(len(VALUES))
"""What a model loses on a value when it knows that one of VALUES comes, and not which."""


@dataclass(frozen=True)
class NeedleSample:
    """A prompt of T = len(ids) tokens, the answer prefix included."""

    ids: Tensor
    """(T,) int64, on the CPU."""
    answer_ids: list[int]
    """The tokens of the right value after the prompt."""
    key: str
    value: str
    units: int
    """Noise lines of the haystack."""
    depth_tokens: int
    """Tokens before the needle's line."""


def prompt_lines(units: int, at: int, key: str, value: str) -> list[str]:
    """The prompt's lines, the needle after ``at`` of ``units`` noise lines; joined by newlines they are the text."""
    needle, tail = NEEDLE.format(key=key, value=value), TAIL.format(key=key)
    return [HEAD, *[NOISE] * at, needle, *[NOISE] * (units - at), tail]


class LineTokens:
    """The ids of prompts of one key and value, joined from lines that are tokenised once.

    That equals tokenising the text only where a tokenizer does not merge over a line's end; :attr:`exact` says
    whether it does so on every order of neighbours that a prompt can have (head, noise, needle, tail). Longer
    haystacks only repeat these.
    """

    def __init__(self, tokenizer: Any, key: str, value: str):
        _, noise, needle, tail = prompt_lines(1, 1, key, value)
        self.head = tokenizer.encode(HEAD)
        self.noise, self.needle, self.tail = (ids_after(tokenizer, HEAD, "\n" + x) for x in (noise, needle, tail))
        whole = WholeText(tokenizer, key, value)
        cases = [(units, at) for units in range(4) for at in range(units + 1)]
        self.exact = all(torch.equal(self.ids(*case), whole.ids(*case)) for case in cases)

    def ids(self, units: int, at: int) -> Tensor:
        """The prompt, (T,) int64."""
        head, noise, needle, tail = map(torch.tensor, (self.head, self.noise, self.needle, self.tail))
        return torch.cat([head, noise.repeat(at), needle, noise.repeat(units - at), tail])

    def before(self, at: int) -> int:
        """Tokens before the needle's line."""
        return len(self.head) + at * len(self.noise)

    def most_units(self, budget: int, depth: float) -> int:
        """The largest haystack (noise lines) with which the prompt is at most ``budget`` tokens; 0 if none is."""
        return max(0, (budget - len(self.head) - len(self.needle) - len(self.tail)) // len(self.noise))


class WholeText:
    """What :class:`LineTokens` gives, by tokenising whole texts: right with any tokenizer, and slow."""

    def __init__(self, tokenizer: Any, key: str, value: str):
        self.tokenizer, self.key, self.value = tokenizer, key, value

    def ids(self, units: int, at: int) -> Tensor:
        text = "\n".join(prompt_lines(units, at, self.key, self.value))
        return torch.tensor(self.tokenizer.encode(text))

    def before(self, at: int) -> int:
        return len(self.tokenizer.encode("\n".join([HEAD, *[NOISE] * at])))

    def most_units(self, budget: int, depth: float) -> int:
        def fits(units: int) -> bool:
            return len(self.ids(units, int(units * depth / 100))) <= budget

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def ids_after(tokenizer: Any, before: str, text: str) -> list[int]:
    """The ids that ``text`` adds when it follows ``before``; where these cannot be told apart, its own."""
    first, both = tokenizer.encode(before), tokenizer.encode(before + text)
    return list(both[len(first) :] if both[: len(first)] == first else tokenizer.encode(text))


def make_sample(tokenizer: Any, length: int, depth: float, index: int, seed: int, max_new_tokens: int) -> NeedleSample:
    """A pure function of (task, length, depth, index, seed, tokenizer).

    Args:
        tokenizer: the model's own; encode and sha256 are used; nothing stands before the text.
        length: tokens of prompt and answer; the haystack has as many lines as fit.
        depth: place of the needle, in percent of the haystack's lines.
        index: which of the samples with this length and depth.
        max_new_tokens: tokens of ``length`` kept free for the answer.

    Raises:
        UserError: not even a prompt without a haystack fits.
    """
    drawn = int(digest(TASK, length, float(depth), index, seed, tokenizer.sha256), 16)
    drawn, which = divmod(drawn, len(VALUES))
    key, value = KEYS[drawn % len(KEYS)], str(VALUES[which])
    lines = LineTokens(tokenizer, key, value)
    source = lines if lines.exact else WholeText(tokenizer, key, value)
    units = source.most_units(length - max_new_tokens, depth)
    at = int(units * depth / 100)
    ids = source.ids(units, at)
    if len(ids) + max_new_tokens > length:
        raise UserError(
            f"evaluation.needle.lengths: given {length}; with this tokenizer a prompt without a haystack is {len(ids)} "
            f"tokens, and {max_new_tokens} are kept for the answer: use at least {len(ids) + max_new_tokens}"
        )
    answer_ids = ids_after(tokenizer, TAIL.format(key=key), f" {value}")
    return NeedleSample(ids, answer_ids, key, value, units, source.before(at))


@torch.no_grad()
def answer_nll(model: nn.Module, last_logits: Tensor, state: Any, answer_ids: list[int]) -> float:
    """Mean negative log-likelihood (nats a token) of the answer behind a prompt; ``state`` is left as it is.

    Args:
        last_logits: (1, V), and the state behind them, as :func:`prefill` returns.
    """
    answer = torch.tensor([answer_ids], device=last_logits.device)
    logits = last_logits[:, None]
    if len(answer_ids) > 1:
        more, _ = model(answer[:, :-1], map_tensors(state, torch.clone))
        logits = torch.cat([logits, more], dim=1)
    return float(F.cross_entropy(logits[0].float(), answer[0]))


class Needle:
    """One record a sample; lengths x depths x samples of them, shortest first."""

    name = "needle"

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.settings = run, config.evaluation.needle
        self.prefill_tokens = config.evaluation.prefill_tokens
        self.jobs = [
            (length, float(depth), index)
            for length in sorted(set(self.settings.lengths))
            for depth in sorted(set(self.settings.depths))
            for index in range(self.settings.samples)
        ]
        new, seed = self.settings.max_new_tokens, self.settings.seed
        self.keys = [digest(TASK, *job, seed, run.tokenizer.sha256, run.checkpoint_hash, new) for job in self.jobs]
        make_sample(run.tokenizer, *self.jobs[0], seed, new)  # too short a length is said at once

    def measure(self, index: int) -> dict:
        """Reads sample ``index`` and answers it.

        ``score`` is 1 when the answer holds the value (RULER's lower-cased substring), else 0. ``answer_nll`` is
        the finer figure for models that never score: nats a token of the right value; ``chance_nll`` is what it is
        for a model that knows the form of a value and nothing about which. ``peak_memory`` is in bytes: on CUDA that
        of this sample's tensors, on a CPU the most that the process has ever held.
        """
        length, depth, number = self.jobs[index]
        run, new = self.loaded, self.settings.max_new_tokens
        sample = make_sample(run.tokenizer, length, depth, number, self.settings.seed, new)
        device = device_of(run.model)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = _now(device)
        logits, state = prefill(run.model, sample.ids[None], self.prefill_tokens)
        read = _now(device)
        nll = answer_nll(run.model, logits, state, sample.answer_ids)
        size, between = state_bytes(state), _now(device)
        answer = list(greedy(run.model, logits, state, new, {run.tokenizer.eos_id}))
        wrote = _now(device)
        prediction = run.tokenizer.decode(answer)
        return {
            "task": TASK,
            "length": length,
            "depth": depth,
            "index": number,
            "tokens": len(sample.ids),
            "depth_tokens": sample.depth_tokens,
            "prediction": prediction,
            "expected": sample.value,
            "score": int(sample.value.lower() in prediction.lower()),
            "answer_nll": nll,
            "answer_tokens": len(sample.answer_ids),
            "chance_nll": CHANCE_NATS / len(sample.answer_ids),
            "prefill_tokens_per_s": len(sample.ids) / (read - began),
            "decode_tokens_per_s": len(answer) / (wrote - between) if answer else None,
            "peak_memory": _peak_memory(device),
            "state_bytes": size,
        }

    def summary(self, records: list[dict]) -> dict:
        """Accuracy with its Wilson 95 % interval: over all, by length, and by length and depth."""
        lengths = sorted({r["length"] for r in records})
        depths = sorted({r["depth"] for r in records})
        by_length = []
        for length in lengths:
            part = [r for r in records if r["length"] == length]
            means = {name: _mean(part, name) for name in ("tokens", "prefill_tokens_per_s", "decode_tokens_per_s")}
            peaks = {name: max(r[name] for r in part) for name in ("peak_memory", "state_bytes")}
            by_length.append({"length": length, **_scores(part), **means, **peaks})
        cells = [
            {"length": x, "depth": y, **_scores([r for r in records if (r["length"], r["depth"]) == (x, y)])}
            for x in lengths
            for y in depths
        ]
        return {
            "task": TASK,
            **_scores(records),
            "chance": f"accuracy: 1 in {len(VALUES):,}; chance_nll: what a model loses that knows a value's form only",
            "by_length": by_length,
            "cells": cells,
        }

    def table(self, summary: dict) -> str:
        depths = sorted({cell["depth"] for cell in summary["cells"]})
        lines = [
            f"needle (RULER S-NIAH-1, {summary['n']} samples): accuracy % [Wilson 95 %] n, by length and depth",
            f"  {'length':>9} " + " ".join(f"{f'{depth:g} %':>16}" for depth in depths) + f" {'all':>16}",
        ]
        for row in summary["by_length"]:
            cells = [cell for cell in summary["cells"] if cell["length"] == row["length"]]
            lines.append(f"  {row['length']:>9} " + " ".join(f"{_figures(cell):>16}" for cell in (*cells, row)))
        lines.append(
            f"  {'length':>9} {'nll/token':>10} {'chance':>8} {'prefill t/s':>12} {'decode t/s':>11} "
            f"{'peak MiB':>9} {'state MiB':>10}"
        )
        for row in summary["by_length"]:
            decode = "-" if row["decode_tokens_per_s"] is None else f"{row['decode_tokens_per_s']:.1f}"
            lines.append(
                f"  {row['length']:>9} {row['answer_nll']:>10.3f} {row['chance_nll']:>8.3f} "
                f"{row['prefill_tokens_per_s']:>12.1f} {decode:>11} "
                f"{row['peak_memory'] / 2**20:>9.1f} {row['state_bytes'] / 2**20:>10.2f}"
            )
        return "\n".join(lines)

    def plot(self, summary: dict, folder: Path, title: str) -> Path:
        return plot_needle(summary, folder / "needle.png", f"Needle in noise (RULER S-NIAH-1)\n{title}")


def _scores(records: list[dict]) -> dict:
    hits = sum(r["score"] for r in records)
    low, high = wilson(hits, len(records))
    return {
        "mean": hits / len(records),
        "n": len(records),
        "low": low,
        "high": high,
        "answer_nll": _mean(records, "answer_nll"),
        "chance_nll": _mean(records, "chance_nll"),
    }


def _figures(row: dict) -> str:
    return f"{100 * row['mean']:.0f} [{100 * row['low']:.0f}, {100 * row['high']:.0f}] {row['n']}"


def _mean(records: list[dict], field: str) -> float | None:
    values = [r[field] for r in records if r[field] is not None]
    return math.fsum(values) / len(values) if values else None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
