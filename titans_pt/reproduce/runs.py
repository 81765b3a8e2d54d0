"""A run of a study: trained once, measured, and kept as a record."""

import copy
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from titans_pt.config import Config
from titans_pt.config.yaml import resolved_yaml
from titans_pt.errors import Diverged, UserError
from titans_pt.reproduce.measures import Measure, last_names
from titans_pt.reproduce.rates import Grid, Progress
from titans_pt.reproduce.records import Records, compare, without_folders
from titans_pt.reproduce.study import Row
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder, versions
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tools.files import write_text
from titans_pt.tools.processes import outside
from titans_pt.training import loop
from titans_pt.training.plan import Cost, cost_of


@dataclass(frozen=True)
class Choice:
    """Choice of a row's learning rate by runs ``probe(rate)`` on a ``grid``.

    plain: rates that are not in the names of runs: those of the first grid, which keeps its records valid, or the
    config's.
    """

    row: Row
    grid: Grid
    probe: Callable[[float], "Run"]
    plain: tuple[float, ...] = ()

    def progress(self, records: Records) -> tuple[Progress, dict[float, float]]:
        """State of the choice, and the losses by rate for probes that have a record."""
        losses: dict[float, float] = {}
        while True:
            state = self.grid.progress(losses)
            found = {rate: record for rate in state.missing if (record := self.probe(rate).record(records))}
            if not found:
                return state, losses
            losses |= {rate: loss_of(record) for rate, record in found.items()}


def loss_of(record: dict[str, Any]) -> float:
    """Validation loss; infinite if the training failed or the loss is not finite, which a record holds as null."""
    loss = record["trained"]["validation_loss"]
    return math.inf if record["failed"] or loss is None else loss


@dataclass(frozen=True)
class Run:
    """A run of a study. ``config``: all its settings.

    With a ``choice``, the learning rate is still open, and the folder if the run's name changes.
    """

    name: str
    model: str
    variant: str
    config: Config
    measures: tuple[Measure, ...] = ()
    choice: Choice | None = None
    before: tuple["Run", ...] = ()
    """Runs that must finish first: this run starts from their weights."""
    rates: tuple[tuple[float, float], ...] = ()
    """Learning rates from which the rate of ``config`` was chosen, each with the loss of its probe."""

    @property
    def data(self) -> tuple[str, ...]:
        """The task, the folder of its data, and the series or problem that it reads from there."""
        config, section = self.config, self.config.section(self.config.task)
        return config.task, config.data.dir, section.get("series") or section.get("problem") or ""

    @cached_property
    def cost(self) -> Cost:
        return cost_of(task_of(self.config))

    def probes(self, records: Records) -> list["Run"]:
        """Short runs that the choice of the learning rate requires so far, the lowest rate first."""
        return [self.choice.probe(rate) for rate in self.choice.progress(records)[0].rates] if self.choice else []

    def is_a_probe(self, records: Records) -> bool:
        """Whether the choice of its learning rate also trains it: its probes are whole runs of this seed."""

        def what(run: Run) -> tuple:
            return run.variant, run.config.run.seed, run.config.train.max_steps

        return what(self) in map(what, self.probes(records))

    def at(self, rate: float, named: bool) -> "Run":
        """The run with a learning rate, which is in its name if ``named``."""
        config, name = self.config, f"{self.name}-lr{rate:g}" if named else self.name
        update = {
            "train": config.train.model_copy(update={"lr": rate}),
            "run": config.run.model_copy(update={"dir": str(Path(config.run.dir).with_name(name))}),
        }
        return replace(self, name=name, config=config.model_copy(update=update), choice=None)

    def chosen(self, records: Records) -> list["Run"]:
        """The run with the rate that the probes so far choose, then the run with each rate that smaller grids chose."""
        return self._with(self.choice.progress(records)[0].bests if self.choice else (), records)

    def _with(self, rates: Sequence[float], records: Records) -> list["Run"]:
        """The run with each rate, or the run itself without a choice; empty while an earlier run is missing."""
        if not all(run.record(records) for run in self.before):
            return []
        if self.choice is None:
            return [self]
        return [self.at(rate, named=rate not in self.choice.plain) for rate in rates]

    def settled(self, records: Records) -> "Run | None":
        """The run with the learning rate that the probes chose; None while a probe or an earlier run is missing."""
        if self.choice is None:
            return next(iter(self._with((), records)), None)
        state, losses = self.choice.progress(records)
        if state.missing or not (chosen := self._with(state.bests[:1], records)):
            return None
        return replace(chosen[0], rates=tuple((rate, losses[rate]) for rate in state.rates))

    def record(self, records: Records) -> dict[str, Any] | None:
        ready = self.settled(records)
        return records.of(ready.name, ready.config) if ready else None

    def missing(self, record: dict[str, Any] | None) -> list[str]:
        """Open work: "training", then names of measures. Nothing more is done to a run that failed."""
        if record and record["failed"]:
            return []
        found = record["measured"] if record else {}
        undone = [m.name for m in self.measures if not m.done(found.get(m.name, {}), self.config)]
        return [*(() if record else ("training",)), *undone]

    def begin(self, trained: dict[str, Any], failed: str) -> dict[str, Any]:
        """A record without measurements. ``failed``: reason why the training failed, "" if it did not.

        The loss of a failed rate is null.
        """
        return {
            "name": self.name, "model": self.model, "variant": self.variant, "seed": self.config.run.seed,
            "failed": failed, "rates": self._tried(),
            "trained": trained, "measured": {}, "config": portable(self.config),
        }  # fmt: skip

    def _tried(self) -> list[list[float | None]]:
        return [[rate, loss if math.isfinite(loss) else None] for rate, loss in self.rates]

    def _failed_before(self, records: Records) -> str:
        """Reason why the run has no weights to start from: an earlier run failed; "" if none did."""
        failed = [run.name for run in self.before if (record := run.record(records)) and record["failed"]]
        return f"{failed[0]}, from which it starts, failed" if failed else ""

    def complete(self, records: Records, ranks: int, claim: int) -> int:
        """Do the missing work and write it to the record; return 0, or the status of a training that was stopped.

        Only for a run of :meth:`settled`.

        Args:
            ranks: processes per training.
            claim: descriptor that the processes of a training inherit: while they live, the run is claimed.

        Raises:
            UserError: a measure is missing, and the weights for it are not there; or the run's folder holds a run with
                other settings.
        """
        config = self.config
        folder, record = RunFolder(config.run.dir), records.of(self.name, config)
        if record is None:
            if begun := checkpoints.newest_complete(folder.checkpoints):
                compare(folder.path, checkpoints.read_state(begun).config, config)
            began, cpu = _steps(folder), time.process_time()
            status, failed = 0, self._failed_before(records)
            try:
                if not failed:
                    status = loop.train(config) if ranks == 1 else _torchrun(config, ranks, claim)
            except Diverged as error:  # other errors, such as a wrong setting, stop the study
                status, failed = 0, str(error).partition(";")[0]
            if status:
                return status
            seconds = (time.process_time() - cpu) if ranks == 1 and not torch.cuda.is_available() else None
            trained = describe(config, folder, self.cost.parameters, began, seconds)
            record = self.begin(trained, failed)
            records.write(self.name, record)
        for measure in self.measures:
            if measure.name not in self.missing(record):
                continue
            if checkpoints.newest_complete(folder.checkpoints) is None:
                raise UserError(
                    f"{records.path(self.name)}: trained elsewhere, and {folder.path} has no weights to measure "
                    f"{measure.name} of; copy the run's folder there, or delete the record to train it again"
                )
            record["rates"] = record["rates"] or self._tried()  # none if it was trained as a probe
            before = record["measured"].get(measure.name, {})
            record["measured"][measure.name] = measure.take(folder.path, config, before)
            records.write(self.name, record)
        return 0


def in_order(runs: Sequence[Run], records: Records) -> list[Run]:
    """``runs``, each after the probes that the choice of its learning rate requires so far; every probe once.

    A probe may have the name of a run, which then measures the probe's weights.
    """
    found: dict[tuple[str, bool], Run] = {}
    for run in runs:
        for probe in run.probes(records):
            found.setdefault((probe.name, True), probe)
        found.setdefault((run.name, False), run)
    return list(found.values())


def describe(config: Config, folder: RunFolder, parameters: int, began: int, seconds: float | None) -> dict[str, Any]:
    """Entries of a record about a training.

    Args:
        began: the step at which this process started or resumed the training.
        seconds: CPU seconds that this process has spent on it since; None where they mean nothing.
    """
    metrics = read_metrics(folder.metrics)
    train = [row for row in metrics if row["kind"] == "train"]
    validation = [row for row in metrics if row["kind"] == "validation"]
    step, tokens = _steps(folder), config.train.batch_tokens
    about, newest = versions(), checkpoints.newest_complete(folder.checkpoints)
    best = checkpoints.read_state(newest).best if newest else {}
    last = validation[-1]["validation_loss"] if validation else None
    speeds = [row["tokens_per_second"] for row in train]
    done = (step - began) * tokens
    return {
        "parameters": parameters,
        "steps": step,
        "tokens": step * tokens,
        "lr": config.train.lr,
        "validation_loss": best.get("loss", last),
        "skipped": sum(row["kind"] in ("nonfinite", "spike") for row in metrics),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "tokens_per_cpu_second": done / seconds if seconds and done > step * tokens / 4 else None,
        "hardware": hardware(about),
        "checkpoint": weights_hash(checkpoints.best(newest)) if newest else "",
        "data": checkpoints.read_state(newest).identity if newest else {},
        "versions": about,
        "curve": [[row["step"] * tokens, row["loss"], row["grad_norm"]] for row in train],
        "validation": [[row["step"] * tokens, row["validation_loss"]] for row in validation],
        "figures": _figures(validation, tokens),
    }


def _figures(validation: list[dict], tokens: int) -> dict[str, list]:
    """Validation figures other than the loss, by name: lists of [tokens of training, value]."""
    names = {key for row in validation for key in row if key.startswith("validation_")} - {"validation_loss"}
    return {
        name.removeprefix("validation_"): [[row["step"] * tokens, row[name]] for row in validation if name in row]
        for name in sorted(names)
    }


def weights_hash(checkpoint: Path) -> str:
    """SHA-256 (hex) of a checkpoint's weights, equal for equal runs in any folder.

    For a sharded checkpoint, the hash of its manifest: the weights have no file of their own.
    """
    files = json.loads((checkpoint / checkpoints.MANIFEST).read_text())["files"]
    whole = files.get(checkpoints.MODEL)
    return whole["sha256"] if whole else checkpoints.checkpoint_hash(checkpoint)


def hardware(about: dict[str, str]) -> str:
    """Number and name of the GPUs, or the name of the CPU and the number of threads used."""
    count = torch.cuda.device_count()
    return f"{count} x {about['device']}" if count else f"{about['device']}, {torch.get_num_threads()} thread(s)"


def portable(config: Config) -> dict[str, Any]:
    """The settings without this machine's folders."""
    tree = copy.deepcopy(config.model_dump(mode="json"))
    tree["run"]["dir"] = Path(tree["run"]["dir"]).name
    tree["data"]["dir"] = Path(tree["data"]["dir"]).name
    for source in (*tree["data"]["sources"], *tree["data"]["validation_sources"]):
        source["path"] = source["path"] and Path(source["path"]).name
    tree["evaluation"] = last_names(tree["evaluation"])
    tree["train"]["init_from"] = tree["train"]["init_from"] and Path(tree["train"]["init_from"]).name
    tree |= {tree["task"]: without_folders(tree.get(tree["task"], {}))}
    tokenizer = tree["data"]["tokenizer"]
    tokenizer["path"] = tokenizer["path"] and Path(tokenizer["path"]).name
    return tree


def _steps(folder: RunFolder) -> int:
    """The step of the newest checkpoint; 0 without one."""
    path = checkpoints.newest_complete(folder.checkpoints)
    return checkpoints.read_state(path).step if path else 0


def _torchrun(config: Config, ranks: int, claim: int) -> int:
    """Trains in several processes of this machine, which hold the claim as long as they live; returns their status.

    Raises:
        Diverged: the training diverged.
    """
    folder = RunFolder(config.run.dir)
    folder.diverged.unlink(missing_ok=True)
    settings = folder.path / "asked.yaml"
    write_text(settings, resolved_yaml(config))
    words = [sys.executable, "-m", "titans_pt.training.launcher", str(settings)]
    # The new processes belong to this worker alone, and not to the workers that a cluster started.
    environment = outside(os.environ) | {"TITANS_PROCESSES": str(ranks), "TITANS_NODES": "1"}
    with subprocess.Popen(words, env=environment, pass_fds=[claim]) as process:
        stops = (signal.SIGTERM, signal.SIGUSR1)  # unhandled, these would end this worker before the checkpoint
        before = [signal.signal(number, lambda number, _frame: process.send_signal(number)) for number in stops]
        try:
            status = process.wait()
        finally:
            for number, handler in zip(stops, before, strict=True):
                signal.signal(number, handler)
    if folder.diverged.exists():
        raise Diverged(folder.diverged.read_text().strip())
    return status
