"""Suite needles: needles in noise, asked for in streams of any length, read in constant memory."""

import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titans_pt.config import Config
from titans_pt.evaluation.long_context import read
from titans_pt.runs.loaded import LoadedRun
from titans_pt.streaming import device_of
from titans_pt.tasks.answers import EVALUATION_SEED, answered, stacked
from titans_pt.tasks.needles import NeedlesInNoise
from titans_pt.tools.plots import plot_accuracy
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import proportion, without_keys

ROWS = 8
"""Samples read at once."""


class NeedleAnswers:
    """A job is a batch of at most eight samples of one length and number of needles, the shortest first."""

    name = "needles"
    has_prompts = True

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.settings = run, config.evaluation.needles
        self.prefill_tokens, self.save_every = config.evaluation.prefill_tokens, config.evaluation.save_every
        task: Any = run.task  # Needles, or another task with its questions
        trained: NeedlesInNoise = task.questions(None)
        unseen = self.settings.noise == "unseen"
        self.jobs: list[tuple[NeedlesInNoise, int, int]] = []
        for length in sorted(set(self.settings.lengths)):
            for needles in dict.fromkeys(self.settings.needles or [trained.needles]):
                asked = replace(trained, length=length, needles=needles, unseen=unseen)
                samples = -(-self.settings.answers // needles)
                self.jobs += [(asked, first, min(ROWS, samples - first)) for first in range(0, samples, ROWS)]
        self.keys = [digest(self.name, asdict(asked), first, rows, EVALUATION_SEED, run.identity)
                     for asked, first, rows in self.jobs]  # fmt: skip

    def measure(self, index: int) -> dict:
        """Read samples that training does not draw, and count right answers; continue a reading that was killed."""
        asked, first, rows = self.jobs[index]
        run, device = self.loaded, device_of(self.loaded.model)
        ids, places = stacked(asked, EVALUATION_SEED, first, rows)
        end, began = asked.length - asked.tail, time.perf_counter()
        kept = run.results.reading(self.keys[index])

        def show(stretch: dict):
            if stretch["tokens"] < end:
                rate = rows * stretch["tokens_per_s"]
                print(f"needles: {stretch['tokens']:,} of {asked.length:,} tokens, {rate:,.0f} tokens/s", flush=True)

        _, state, _ = read(run.model, ids[:, :end], self.prefill_tokens, self.save_every, kept, show, run.read_last)
        right = answered(run.model, ids[:, end:].to(device), places.to(device) - end, state)
        return {
            "length": asked.length, "needles": asked.needles, "noise": self.settings.noise, "first": first,
            "right": right.sum(1).tolist(), "seconds": (time.perf_counter() - began) / rows,
        }  # fmt: skip

    def summary(self, records: list[dict]) -> dict:
        """Accuracy of each number of needles by length, with its Wilson 95 % interval over the answers."""
        found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            found[record["needles"]][record["length"]] += record["right"]
        asked = []
        for needles, lengths in sorted(found.items()):
            by_length = []
            for length, right in sorted(lengths.items()):
                n = needles * len(right)
                by_length.append({"length": length, **proportion(sum(right), n)})
            asked.append({"needles": needles, "noise": self.settings.noise, "by_length": by_length})
        return {"asked": asked, "chance": self.jobs[0][0].chance}

    def table(self, summary: dict) -> str:
        lines = [f"needles in {self.settings.noise} noise: accuracy % [Wilson 95 %] n; chance "
                 f"{100 * summary['chance']:.1f} %"]  # fmt: skip
        for row in summary["asked"]:
            known = 100 * without_keys(row["needles"])
            lines.append(f"  {row['needles']:>4} needles (values known, keys not: {known:.1f} %)")
            for cell in row["by_length"]:
                share = f"{100 * cell['mean']:5.1f} [{100 * cell['low']:.1f}, {100 * cell['high']:.1f}] {cell['n']}"
                lines.append(f"  {cell['length']:>17,} tokens: {share}")
        return "\n".join(lines)

    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        """Plot accuracy against length, a line for each number of needles."""
        lines = {f"{row['needles']} needles": row["by_length"] for row in summary["asked"]}
        return [plot_accuracy(lines, folder / "needles.png", f"needles in {self.settings.noise} noise\n{title}")]
