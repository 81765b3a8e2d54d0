"""Suite recall: accuracy of associative recall on new samples, with more pairs, and at more distance."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titans_pt.config import Config
from titans_pt.runs.loaded import LoadedRun
from titans_pt.streaming import device_of
from titans_pt.tasks.answers import EVALUATION_SEED, answered, stacked
from titans_pt.tasks.recall import MQAR
from titans_pt.tools.plots import new_figure, own_style, powers_of_two, save_figure
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import proportion, without_keys

ROWS = 64
"""Samples read at once."""


class RecallAnswers:
    """A job is a batch of samples of one kind: as in training, or with other pairs or another distance."""

    name = "recall"

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.settings = run, config.evaluation.recall
        task: Any = run.task  # Recall, or another task with its mqar
        self.trained: MQAR = task.mqar
        self.jobs = [(by, value, questions, first, min(ROWS, count - first))
                     for by, value, questions, count in self._kinds() for first in range(0, count, ROWS)]  # fmt: skip
        self.keys = [self._key(*job) for job in self.jobs]

    def _kinds(self) -> Iterator[tuple[str, int | None, MQAR, int]]:
        """(what differs from training, its value, the questions, samples)."""
        trained, count = self.trained, self.settings.sequences
        fewer = -(-count // 4)
        yield "", None, trained, count
        for pairs in self.settings.pairs:
            if pairs < trained.vocabulary // 2:
                yield "pairs", pairs, self._resized(pairs=pairs), fewer
        for distance in self.settings.distances:
            yield "distance", distance, self._resized(distance=distance), fewer

    def _resized(self, **changes: int) -> MQAR:
        """The questions with another number of pairs or distance, and as much room per query as in training."""
        trained, other = self.trained, replace(self.trained, **changes)
        room = (trained.length - trained.shortest) * other.pairs // trained.pairs
        return replace(other, length=other.shortest + room)

    def _key(self, by: str, value: int | None, questions: MQAR, first: int, rows: int) -> str:
        kind = [by, value] if by else []  # with the trained number of pairs, questions equal the trained ones
        return digest(self.name, asdict(questions), first, rows, EVALUATION_SEED, *kind, self.loaded.identity)

    def measure(self, index: int) -> dict:
        """Count the right answers of a batch of samples that training does not draw."""
        by, value, questions, first, rows = self.jobs[index]
        device = device_of(self.loaded.model)
        ids, places = (part.to(device) for part in stacked(questions, EVALUATION_SEED, first, rows))
        right = answered(self.loaded.model, ids, places)
        return {"by": by, "value": value, "first": first, "rows": rows, "right": int(right.sum()),
                "answers": right.numel()}  # fmt: skip

    def summary(self, records: list[dict]) -> dict:
        """Accuracy with its Wilson 95 % interval: as in training, by pairs, by distance."""
        found: dict[tuple, list[int]] = {}
        for record in records:
            total = found.setdefault((record["by"], record["value"]), [0, 0])
            total[0] += record["right"]
            total[1] += record["answers"]
        rows = {kind: proportion(*total) for kind, total in found.items()}

        def of(by: str) -> list[dict]:
            return [{by: value} | row for (name, value), row in rows.items() if name == by]

        return rows["", None] | {"chance": self.trained.chance, "trained": asdict(self.trained),
                                 "by_pairs": of("pairs"), "by_distance": of("distance")}  # fmt: skip

    def table(self, summary: dict) -> str:
        def shown(row: dict) -> str:
            return f"{100 * row['mean']:5.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}], n = {row['n']}"

        known = 100 * without_keys(summary["trained"]["pairs"])
        lines = [f"recall: accuracy [Wilson 95 %]; chance {100 * summary['chance']:.1f} %; "
                 f"values known, keys not: {known:.1f} %",
                 f"  as in training: {shown(summary)}"]  # fmt: skip
        lines += [f"  {row['pairs']:>4} pairs:       {shown(row)}" for row in summary["by_pairs"]]
        lines += [f"  distance {row['distance']:>4}:    {shown(row)}" for row in summary["by_distance"]]
        return "\n".join(lines)

    @own_style()
    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        """Plot accuracy against pairs and against distance."""
        figure = new_figure(10.0, 4.2)
        for axes, by in zip(figure.subplots(1, 2, sharey=True), ("pairs", "distance"), strict=True):
            rows = sorted(summary[f"by_{by}"], key=lambda row: row[by])
            means = [100 * row["mean"] for row in rows]
            below = [100 * (row["mean"] - row["low"]) for row in rows]
            above = [100 * (row["high"] - row["mean"]) for row in rows]
            axes.errorbar([row[by] for row in rows], means, yerr=[below, above], marker="o", capsize=3)
            powers_of_two(axes)
            axes.set_xlabel(f"{by} (trained with {summary['trained'][by]})")
            axes.set_ylim(-3, 103)
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("accuracy (%; bars: Wilson 95 %)")
        figure.suptitle(f"recall\n{title}")
        return [save_figure(figure, folder / "recall.png")]
