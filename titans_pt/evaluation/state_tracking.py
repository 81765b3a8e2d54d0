"""Suite state_tracking: accuracy by length and by position, in streams of any length, read in constant memory."""

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from titans_pt.config import Config
from titans_pt.evaluation.long_context import killed_reading
from titans_pt.runs.loaded import LoadedRun
from titans_pt.runs.states import save_state
from titans_pt.streaming import device_of
from titans_pt.tasks.answers import EVALUATION_SEED
from titans_pt.tasks.state_tracking import NOTHING, States, StateTracking
from titans_pt.tools.plots import plot_accuracy
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import doubling, proportion

ROWS = 32
"""Samples read at once."""


class StateAnswers:
    """A job is a batch of samples of one length. If every prefix is asked for, only the longest length is
    read: its samples contain all others."""

    name = "state_tracking"

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.settings = run, config.evaluation.state_tracking
        self.prefill_tokens, self.save_every = config.evaluation.prefill_tokens, config.evaluation.save_every
        task = run.task
        assert isinstance(task, StateTracking)  # the task that names this suite
        self.tokens = task.settings.tokens
        lengths = sorted(set(self.settings.lengths))
        read = lengths[-1:] if task.asked(lengths[-1]).prefixes else lengths
        self.jobs: list[tuple[States, list[int], int, int]] = []
        for length in read:
            inside = [n for n in lengths if n <= length] if len(read) == 1 else [length]
            for first in range(0, self.settings.samples, ROWS):
                self.jobs.append((task.asked(length), inside, first, min(ROWS, self.settings.samples - first)))
        self.keys = [digest(self.name, type(states).__name__, asdict(states), inside, first, rows, EVALUATION_SEED,
                            run.identity) for states, inside, first, rows in self.jobs]  # fmt: skip
        self.chance = task.chance

    def measure(self, index: int) -> dict:
        """Count, at each length, the right last answers and the samples without a wrong answer; and, by position, the
        right answers, in buckets of powers of two. Continue a reading that was killed."""
        states, lengths, first, rows = self.jobs[index]
        ids, targets = np.empty((2, rows, states.length), dtype=np.int32)  # 8 bytes a token at any length
        for row in range(rows):
            ids[row], targets[row] = states.sample(EVALUATION_SEED, first + row)
        right = self._right(torch.from_numpy(ids), targets, self.keys[index])
        asked = targets != NOTHING
        found = []
        for length in lengths:
            end = length * self.tokens
            own, here = right[:, :end], asked[:, :end]
            last = end - 1 - here[:, ::-1].argmax(1)
            whole = (own | ~here).all(1)
            found.append({"length": length, "last": int(own[np.arange(rows), last].sum()), "whole": int(whole.sum()),
                          "right": int(own.sum()), "answers": int(here.sum())})  # fmt: skip
        positions = [[int(right[:, bucket].sum()), int(asked[:, bucket].sum())] for bucket in doubling(asked.shape[1])]
        return {"first": first, "rows": rows, "lengths": found, "positions": positions}

    @torch.no_grad()
    def _right(self, ids: torch.Tensor, targets: np.ndarray, key: str) -> np.ndarray:
        """(rows, T) bool: the best guess after each token is its target."""
        model, device = self.loaded.model, device_of(self.loaded.model)
        kept = self.loaded.results.reading(key)
        right = np.zeros(targets.shape, dtype=bool)
        state, about = killed_reading(kept, device)
        saved = done = int(about.get("tokens", 0))
        if done:
            state, packed = state
            right[:, :done] = np.unpackbits(packed.cpu().numpy(), axis=1, count=done)
        while done < ids.shape[1]:
            stop = min(done + self.prefill_tokens, ids.shape[1], saved + self.save_every)
            logits, state = model(ids[:, done:stop].long().to(device), state)
            right[:, done:stop] = logits.argmax(-1).cpu().numpy() == targets[:, done:stop]
            done = stop
            if done - saved >= self.save_every and done < ids.shape[1]:
                packed = torch.from_numpy(np.packbits(right[:, :done], axis=1))
                save_state((state, packed), kept, {"kind": "reading", "tokens": str(done)})
                saved = done
        kept.unlink(missing_ok=True)
        return right

    def summary(self, records: list[dict]) -> dict:
        """Accuracy by length: of the last answer (mean) with its Wilson 95 % interval, of whole samples and of all
        answers. Accuracy by position, in buckets up to token ``to``: of all answers."""
        sums: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        places: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for record in records:
            for row in record["lengths"]:
                total = sums[row["length"]]
                total["n"] += record["rows"]
                for name in ("last", "whole", "right", "answers"):
                    total[name] += row[name]
            for n, (right, asked) in enumerate(record["positions"]):
                places[n][0] += right
                places[n][1] += asked
        by_length = [
            {"length": length, **proportion(total["last"], total["n"]), "whole": total["whole"] / total["n"],
             "accuracy": total["right"] / total["answers"]}
            for length, total in sorted(sums.items())
        ]  # fmt: skip
        by_position = [{"to": 2**n, "accuracy": right / asked, "n": asked}
                       for n, (right, asked) in sorted(places.items()) if asked]  # fmt: skip
        return {"by_length": by_length, "by_position": by_position, "chance": self.chance}

    def table(self, summary: dict) -> str:
        lines = [f"state tracking: last answer % [Wilson 95 %] n; whole samples %; all answers %; chance "
                 f"{100 * summary['chance']:.1f} %"]  # fmt: skip
        for row in summary["by_length"]:
            last = f"{100 * row['mean']:5.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}] {row['n']}"
            lines.append(f"  {row['length']:>9,}: {last}; {100 * row['whole']:5.1f}; {100 * row['accuracy']:5.1f}")
        return "\n".join(lines)

    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        """Plot the accuracy of the last answer and of whole samples against length."""
        rows = summary["by_length"]
        whole = [{"length": row["length"], **proportion(round(row["whole"] * row["n"]), row["n"])} for row in rows]
        lines = {"last answer": rows, "whole samples": whole}
        return [plot_accuracy(lines, folder / "state_tracking.png", f"state tracking\n{title}")]
