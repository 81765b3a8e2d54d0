"""Measures of a trained run, by ``titans evaluate`` or here, and functions that find figures in their results."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titans_pt.config import Config, ModelConfig
from titans_pt.config.files import validated
from titans_pt.config.history import without_gone
from titans_pt.data_pipeline import TokenFiles
from titans_pt.evaluation import runner
from titans_pt.evaluation.perplexity import resets, token_losses
from titans_pt.layers.memory_observer import memories_of
from titans_pt.models.mixers.common import any_memory
from titans_pt.reproduce.figures import Figure
from titans_pt.runs.loaded import load_run
from titans_pt.streaming import best_device
from titans_pt.tools.statistics import standard_error

TRAINING = "training"
"""Name of the measure for columns whose figure is in the record of the training itself."""
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
CHUNKS = (16, 32, 64, 128, 512)
"""Chunk sizes at which every run of the study of chunks is evaluated."""
STREAMS = 64
"""Most streams of data.seq_len tokens that it reads at each of them."""


@dataclass(frozen=True)
class Measure:
    """A ``suite`` of ``titans evaluate`` with the settings ``words``.

    ``frozen``: values of evaluation.perplexity.freeze_after, only for runs with a memory. ``far``: only for models
    whose time per token does not grow with the length. A million tokens take full attention hours on a CPU.
    """

    name: str
    suite: str
    words: tuple[str, ...] = ()
    frozen: tuple[int, ...] = ()
    far: bool = False

    def settings(self, model: ModelConfig) -> list[str]:
        """Settings for a run; a record that was measured with other settings is measured again."""
        return self.all_words() if any_memory(model.kinds) else list(self.words)

    def all_words(self) -> list[str]:
        """Settings for a run with a memory."""
        freeze = [f"evaluation.perplexity.freeze_after={list(self.frozen)}"] if self.frozen else []
        return [*self.words, *freeze]

    def evaluation(self, config: Config) -> dict[str, Any]:
        """Settings in ``evaluation`` on which the figures of a run with ``config`` depend."""
        stored = {"evaluation": config.evaluation.model_dump(mode="json")}
        tree = validated(stored, self.settings(config.model), model=False).evaluation.model_dump(mode="json")
        return {key: tree[key] for key in (self.suite, "precision", "caching") if key in tree}

    def done(self, found: dict[str, Any], config: Config) -> bool:
        """Whether ``found``, an entry of a record, was measured with the settings that a run with ``config`` gets.

        An older record lacks settings that did not exist yet: they count as today's defaults. Only the last names of
        paths are compared.
        """
        if found.get("words") != self.settings(config.model):
            return False
        now = self.evaluation(config)
        was = found.get("evaluation", {self.suite: found.get("settings", {})} if self.suite in now else {})
        was = without_gone({"evaluation": was})["evaluation"]
        usual = validated({}, self.settings(config.model), model=False).evaluation.model_dump(mode="json")
        return all(last_names(_filled(was[key], usual.get(key))) == last_names(now.get(key)) for key in was)

    def take(self, run: Path, config: Config, before: dict[str, Any]) -> dict[str, Any]:
        """Measure the newest checkpoint of a run; results of a killed process are not measured again.

        Args:
            config: the run's settings; those of ``evaluation`` may have changed since the training.
            before: the record's entry of this measure so far.

        Returns:
            Entry of the record: the suite's summary, and how it was measured ("words" and "evaluation").
        """
        evaluation = self.evaluation(config)
        about = {"words": self.settings(config.model), "evaluation": last_names(evaluation)}
        if self.suite == "chunks":
            return about | {"by_chunk": across_chunks(run)}
        told = [f"evaluation.{key}={json.dumps(value)}" for key, value in evaluation.items()]
        summary = runner.evaluate(run, told, suite=self.suite)
        assert summary is not None  # no other rank is at work
        found = last_names(summary[self.suite])
        return about | found | ({"asked": _all_asked(before, found)} if "asked" in found else {})


def of_lengths(name: str, suite: str, lengths: Sequence[int], samples: int, *words: str, far: bool = False) -> Measure:
    """Measure of ``samples`` per task and length by a suite that asks questions in texts of these lengths."""
    asked = f"lengths=[{','.join(map(str, lengths))}]", f"samples={samples}", *words
    return Measure(name, suite, tuple(f"evaluation.{suite}.{word}" for word in asked), far=far)


def _filled(was: Any, usual: Any) -> Any:
    """``was``, completed with missing settings from ``usual``, and without settings that no longer exist."""
    if not isinstance(was, dict) or not isinstance(usual, dict):
        return was
    return {key: _filled(was[key], value) if key in was else value for key, value in usual.items()}


def last_names(value: Any) -> Any:
    """Settings, or results, with paths cut to their last names: folders differ between machines."""
    if isinstance(value, dict):
        return {key: last_names(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) else value


def _all_asked(before: dict[str, Any], found: dict[str, Any]) -> list[dict]:
    """Answers about needles, by number and noise, at all lengths evaluated so far; the newest for each length."""
    rows: dict[tuple, dict[int, dict]] = {}
    for row in (*before.get("asked", ()), *found["asked"]):
        cells = rows.setdefault((row["needles"], row["noise"]), {})
        cells |= {cell["length"]: cell for cell in row["by_length"]}
    return [{"needles": needles, "noise": noise, "by_length": [cells[length] for length in sorted(cells)]}
            for (needles, noise), cells in rows.items()]  # fmt: skip


def across_chunks(run: Path) -> list[dict]:
    """Validation loss of a run at the chunk sizes CHUNKS, with the same weights and the same bound of theta."""
    loaded = load_run(run, device=best_device())
    config, validation = loaded.config, TokenFiles.open(loaded.config).validation
    length = config.data.seq_len
    streams = min(STREAMS, (validation.tokens - 1) // length)
    found = []
    for size in CHUNKS:
        with chunks_of(loaded.model, size):
            losses = []
            for start in range(0, streams * length, length):
                ids = torch.from_numpy(validation.read(start, start + length + 1).astype("int64"))
                reset = resets(validation, start, len(ids), config)
                part = token_losses(loaded.model, ids, config.evaluation.prefill_tokens, reset)
                losses.append(float(part.mean()))
        mean, tokens = math.fsum(losses) / streams, streams * length
        of_size = {"chunk": size, "loss": mean, "stderr": standard_error(losses), "tokens": tokens}
        found.append(of_size | {"streams": streams, "by_stream": losses})
    return found


@contextlib.contextmanager
def chunks_of(model: nn.Module, size: int):
    """Context in which the memories of ``model`` take their gradients at the start of chunks of ``size`` tokens."""
    memories: list[Any] = list(memories_of(model).values())
    before = [memory.config for memory in memories]
    try:
        for memory in memories:
            memory.config = memory.config.model_copy(update={"chunk_size": size})
        yield
    finally:
        for memory, config in zip(memories, before, strict=True):
            memory.config = config


# ---- figures in the results


Find = Callable[[dict], Figure | None]
"""Function that finds a figure in a measure's result; None if the result lacks it (a run without a memory, for
example)."""


def _row(rows: Iterable[dict], key: str, value: Any) -> dict | None:
    """The row of a table whose entry ``key`` is ``value``."""
    return next((row for row in rows if row[key] == value), None)


def _accuracy(row: dict | None) -> Figure | None:
    """Figure of a row with the mean over n answers."""
    return Figure("accuracy", row["mean"], row["n"]) if row else None


def text_loss(result: dict) -> Figure:
    by_stream = tuple(result.get("by_stream", ()))
    return Figure(
        "perplexity", result["loss"], result["tokens"], result["stderr"], result["streams"], by_stream,
        result.get("length", 0),
    )  # fmt: skip


def frozen_loss(after: int) -> Find:
    """Loss with writes to the memory disabled after this many tokens."""

    def find(result: dict) -> Figure | None:
        row = _row(result["frozen"], "after", after)
        return text_loss({"length": result.get("length", 0)} | row) if row else None

    return find


def loss_up_to(length: int) -> Find:
    """Find the loss of the first ``length`` tokens of each stream."""

    def find(result: dict) -> Figure | None:
        row = _row(result["by_length"], "length", length)
        tokens = sum(row["n"] for row in result["positions"] if row["last"] <= length)
        return Figure("perplexity", row["loss"], tokens) if row else None

    return find


def at_chunk(size: int) -> Find:
    def find(result: dict) -> Figure | None:
        row = _row(result["by_chunk"], "chunk", size)
        return text_loss(row) if row else None

    return find


def harness(task: str, metric: str) -> Find:
    """A figure from lm-eval: an accuracy, or a perplexity, which is shown unchanged."""

    def find(result: dict) -> Figure | None:
        row = result["tasks"].get(task)
        if row is None or metric not in row:
            return None
        return Figure("accuracy" if metric.startswith("acc") else "number", row[metric], row["n"])

    return find


def average(result: dict) -> Figure | None:
    """The mean of the paper's accuracies, in percent."""
    if result["average"] is None:
        return None
    return Figure("number", 100 * result["average"], sum(result["tasks"][task]["n"] for task in result["averaged"]))


def both_perplexities(result: dict) -> Figure | None:
    """Mean of the perplexities of WikiText and LAMBADA."""
    found = [harness("wikitext", "word_perplexity")(result), harness("lambada_openai", "perplexity")(result)]
    return _mean(found)


def question(task: str, length: int) -> Find:
    """Accuracy on a needle or BABILong task at a length."""

    def find(result: dict) -> Figure | None:
        return _accuracy(_row(result["tasks"].get(task, {}).get("by_length", ()), "length", length))

    return find


def mean_of(tasks: tuple[str, ...], lengths: tuple[int, ...]) -> Find:
    """Mean accuracy over all cells of a table, in percent."""

    def find(result: dict) -> Figure | None:
        return _mean([question(task, length)(result) for task in tasks for length in lengths], 100)

    return find


def _mean(figures: Sequence[Figure | None], unit: float = 1) -> Figure | None:
    found = [f for f in figures if f is not None]
    if len(found) < len(figures):
        return None
    return Figure("number", unit * sum(f.value for f in found) / len(found), sum(f.n for f in found))


def recalled(result: dict) -> Figure | None:
    """Accuracy on samples like those of training."""
    return _accuracy(result)


def first_at(accuracy: float, figure: str = "accuracy") -> Find:
    """Training tokens until a validation figure first reaches a value; None if it never does."""

    def find(trained: dict) -> Figure | None:
        points = trained.get("figures", {}).get(figure, [])
        return next((Figure("number", tokens, 1) for tokens, value in points if value >= accuracy), None)

    return find


def steps_trained(trained: dict) -> Figure:
    return Figure("number", trained["steps"], 1)


def nats(result: dict) -> Figure:
    """Loss of validation text in nats."""
    return Figure("number", result["loss"], result["tokens"])


def classified(column: str, correlation: bool = False) -> Find:
    """Accuracy, or Matthews' correlation, on a labelled set's test or on the part of it that ``column`` names."""

    def find(result: dict) -> Figure | None:
        if not (row := result["columns"].get(column)):
            return None
        return Figure("number", row["mcc"], row["n"]) if correlation else _accuracy(row)

    return find


def baseline(name: str) -> Find:
    """Accuracy of one of a labelled set's baselines on the whole test."""

    def find(result: dict) -> Figure | None:
        row = result["baselines"].get(name, {}).get("test")
        return row and Figure("accuracy", row["accuracy"], row["n"])

    return find


def tokens_trained(trained: dict) -> Figure:
    return Figure("number", trained["tokens"], 1)


def found_at(length: int, needles: int | None = None) -> Find:
    """Accuracy on needles in noise at a length; ``needles`` None: for the first number of needles evaluated."""

    def find(result: dict) -> Figure | None:
        rows = [row for row in result["asked"] if needles in (None, row["needles"])]
        return _accuracy(_row(rows[0]["by_length"], "length", length)) if rows else None

    return find


def last_answer(length: int) -> Find:
    """Accuracy of the last answer in samples of this many elements."""

    def find(result: dict) -> Figure | None:
        return _accuracy(_row(result["by_length"], "length", length))

    return find
