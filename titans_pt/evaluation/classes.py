"""The test of a labelled set: accuracy and Matthews' correlation, beside baselines that need no model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.genomics import prepared
from titans_pt.genomics.alphabet import PAD, encoded
from titans_pt.genomics.baselines import columns, confusion, distinct, score
from titans_pt.genomics.sets import centre
from titans_pt.runs.loaded import LoadedRun
from titans_pt.streaming import device_of
from titans_pt.tools.plots import new_figure, own_style, save_figure
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import proportion

TITLES = {"test": "whole test", "distinct": "without copies of training sequences", "middle": "middle bases alone"}


class ClassesOfTest:
    """A job is a batch of test sequences, whole or cut to their middle."""

    name = "classes"

    def __init__(self, run: LoadedRun, config: Config):
        task: Any = run.task  # ClassifyDna, or another task with its settings and trained_on
        self.loaded, self.settings = run, task.settings
        found = prepared.read(Path(config.data.dir))
        trained = task.trained_on
        if trained and trained != found.sha256:
            raise UserError(f"data.dir: {config.data.dir} holds another set than {run.folder.path} was trained on; "
                            "give data.dir=FOLDER, where that one is")  # fmt: skip
        self.given, self.manifest = found.given, found.manifest
        self.names = [column.name for column in columns(found.given, found.manifest["middle"])]
        asked = [name for name in self.names if name != "distinct"]  # it uses predictions of the whole test
        starts = range(0, len(self.given.test.labels), self.settings.reads)
        self.jobs = [(name, start) for name in asked for start in starts]
        self.keys = [digest(self.name, found.sha256, name, self.manifest["middle"], start, self.settings.reads,
                            run.identity) for name, start in self.jobs]  # fmt: skip

    @torch.no_grad()
    def measure(self, index: int) -> dict:
        """Predict the classes of a batch of test sequences."""
        name, start = self.jobs[index]
        sequences = self.given.test.sequences[start : start + self.settings.reads]
        if name == "middle":
            sequences = [centre(sequence, self.manifest["middle"]) for sequence in sequences]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        ids = torch.full((len(sequences), int(lengths.max())), PAD)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.from_numpy(encoded(sequence).astype(np.int64))
        device = device_of(self.loaded.model)
        logits, _ = self.loaded.model(ids.to(device), lengths.to(device))
        return {"by": name, "first": start, "predicted": logits.argmax(-1).tolist()}

    def summary(self, records: list[dict]) -> dict:
        """Accuracy of each column with its Wilson 95 % interval, the correlation and the counts of each class's
        predictions, and the set's baselines."""
        labels, classes = self.given.test.labels, len(self.given.classes)
        by: dict[str, list[int]] = {}
        for record in records:
            by.setdefault(record["by"], []).extend(record["predicted"])
        found = {}
        for name in self.names:
            predicted = np.array(by["test" if name == "distinct" else name], np.int64)
            kept = distinct(self.given) if name == "distinct" else np.ones(len(labels), bool)
            counts = confusion(predicted[kept], labels[kept], classes)
            scored = score(counts)
            found[name] = proportion(scored["right"], scored["n"])
            found[name] |= {"mcc": scored["mcc"], "confusion": counts.tolist()}
        return {"classes": list(self.given.classes), "middle": self.manifest["middle"], "columns": found,
                "baselines": self.manifest["baselines"], "copies": self.manifest["copies"]}  # fmt: skip

    def table(self, summary: dict) -> str:
        lines = ["classes: accuracy of the test [Wilson 95 %] and Matthews' correlation"]
        for name, row in summary["columns"].items():
            interval = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
            title = TITLES[name] if name != "middle" else f"middle {summary['middle']} bases alone"
            lines.append(f"  {title:<38}{100 * row['mean']:5.1f} % {interval}, {row['mcc']:+.3f}, n = {row['n']:,}")
        for name, counts in zip(summary["classes"], summary["columns"]["test"]["confusion"], strict=True):
            shown = ", ".join(f"{n:,} {other}" for n, other in zip(counts, summary["classes"], strict=True) if n)
            lines.append(f"  of {sum(counts):,} {name}, predicted: {shown or 'none'}")
        return "\n".join([*lines, *prepared.baseline_table(self.manifest)])

    @own_style()
    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        """Plot the accuracy of model and baselines, a group of bars for each column."""
        names = list(summary["columns"])
        bars = {"model": {name: summary["columns"][name]["mean"] for name in names}} | {
            baseline: {name: found[name]["accuracy"] for name in names}
            for baseline, found in summary["baselines"].items()
        }  # fmt: skip
        figure = new_figure(2.6 + 2.6 * len(names), 4.2)
        axes = figure.subplots()
        width = 0.8 / len(bars)
        for n, (kind, found) in enumerate(bars.items()):
            places = [i + (n - (len(bars) - 1) / 2) * width for i in range(len(names))]
            color = "C0" if n == 0 else str(0.75 - 0.12 * n)
            drawn = axes.bar(places, [100 * found[name] for name in names], width, label=kind, color=color)
            axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=6)
        rows = [summary["columns"][name] for name in names]
        below, above = ([100 * abs(row["mean"] - row[end]) for row in rows] for end in ("low", "high"))
        places = [i - (len(bars) - 1) / 2 * width for i in range(len(names))]
        axes.errorbar(
            places, [100 * row["mean"] for row in rows], [below, above], fmt="none", ecolor="black", capsize=3
        )
        axes.set_xticks(range(len(names)), [TITLES[name] for name in names], fontsize=8)
        axes.set_ylabel("accuracy (%; bar: Wilson 95 %)")
        axes.set_ylim(0, 128)
        axes.set_yticks(range(0, 101, 20))
        axes.legend(fontsize=8, loc="upper center", ncol=3)
        axes.set_title(f"{', '.join(summary['classes'])}\n{title}", fontsize=9)
        return [save_figure(figure, folder / "classes.png")]
