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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from titans_pt.config import Config
from titans_pt.config.yaml import resolved_yaml
from titans_pt.errors import Diverged, UserError
from titans_pt.reproduce.measures import Measure
from titans_pt.reproduce.records import Records, without_folders
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder, versions
from titans_pt.tasks import task_of
from titans_pt.tools.files import write_text
from titans_pt.training import loop
from titans_pt.training.metrics import read_metrics
from titans_pt.training.plan import Cost, cost_of

PROBE_SHARE = 10
"""Learning rates are tried on the tokens divided by this."""


@dataclass(frozen=True)
class Run:
    """``config``: all its settings; with ``probes`` all but the learning rate, which is the best of theirs."""

    name: str
    model: str
    variant: str
    config: Config
    measures: tuple[Measure, ...] = ()
    probes: tuple["Run", ...] = ()
    before: tuple["Run", ...] = ()
    """Runs that come first: their weights are read."""
    is_probe: bool = False
    """A short run that only serves to choose a learning rate."""

    @property
    def data(self) -> tuple[str, ...]:
        """The task, the folder of its data, and what it reads of it."""
        config, section = self.config, self.config.section(self.config.task)
        return config.task, config.data.dir, section.get("series") or section.get("problem") or ""

    @cached_property
    def cost(self) -> Cost:
        return cost_of(task_of(self.config))

    def settled(self, records: Records) -> Config | None:
        """``config`` with the learning rate that the probes chose; None while a probe or an earlier run is missing."""
        if not all(run.record(records) for run in self.before):
            return None
        if not self.probes:
            return self.config
        found = [(probe, records.of(probe.name, probe.config)) for probe in self.probes]
        if not all(record for _, record in found):
            return None
        lr = best_learning_rate({probe.config.train.lr: record for probe, record in found})
        return self.config.model_copy(update={"train": self.config.train.model_copy(update={"lr": lr})})

    def record(self, records: Records) -> dict[str, Any] | None:
        config = self.settled(records)
        return config and records.of(self.name, config)

    def missing(self, record: dict[str, Any] | None) -> list[str]:
        """Open work: "training", then names of measures. Nothing more is done to a run that failed."""
        if record and record["failed"]:
            return []
        found = record["measured"] if record else {}
        undone = [m.name for m in self.measures if found.get(m.name, {}).get("words") != m.settings(self.config.model)]
        return [*(() if record else ("training",)), *undone]

    def begin(self, config: Config, trained: dict[str, Any], failed: str) -> dict[str, Any]:
        """A record without measurements; ``failed`` says why there will be none."""
        return {
            "name": self.name, "model": self.model, "variant": self.variant, "seed": config.run.seed, "failed": failed,
            "trained": trained, "measured": {}, "config": portable(config),
        }  # fmt: skip

    def complete(self, config: Config, records: Records, ranks: int, claim: int) -> int:
        """Does what is missing and writes it to the record; returns 0, or the status of a training that was stopped.

        Args:
            config: of :meth:`settled`.
            ranks: processes of a training.
            claim: descriptor that the processes of a training inherit: while they live, the run is claimed.

        Raises:
            UserError: the weights of a trained run, of which something is still to be measured, are not there.
        """
        folder, record = RunFolder(config.run.dir), records.of(self.name, config)
        if record is None:
            began, cpu = _steps(folder), time.process_time()
            try:
                status = loop.train(config) if ranks == 1 else _torchrun(config, ranks, claim)
                failed = ""
            except Diverged as error:  # any setting that is wrong stops the study
                status, failed = 0, str(error).partition(";")[0]
            if status:
                return status
            seconds = (time.process_time() - cpu) if ranks == 1 and not torch.cuda.is_available() else None
            trained = describe(config, folder, self.cost.parameters, began, seconds)
            record = self.begin(config, trained, failed)
            records.write(self.name, record)
        for measure in self.measures:
            if measure.name not in self.missing(record):
                continue
            if checkpoints.newest_complete(folder.checkpoints) is None:
                raise UserError(
                    f"{records.path(self.name)}: trained elsewhere, and {folder.path} has no weights to measure "
                    f"{measure.name} of; copy the run's folder there, or delete the record to train it again"
                )
            words = measure.settings(config.model)
            record["measured"][measure.name] = {"words": words, **measure.take(folder.path, words)}
            records.write(self.name, record)
        return 0


def best_learning_rate(probes: dict[float, dict]) -> float:
    """The rule: the lowest validation loss after a tenth of the tokens; a run that failed has lost; of two that are
    equal the smaller rate."""

    def loss(lr: float) -> float:
        found = probes[lr]["trained"]["validation_loss"]
        return math.inf if probes[lr]["failed"] or found is None else found

    return min(sorted(probes), key=loss)


def describe(config: Config, folder: RunFolder, parameters: int, began: int, seconds: float | None) -> dict[str, Any]:
    """Entries of a record on a training.

    Args:
        began: the step at which this process took it up.
        seconds: of CPU that this process spent on it since; None where that says nothing.
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
        "skipped": sum(row["kind"] == "nonfinite" for row in metrics),
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
    """Figures of validation other than the loss, by name: [tokens of training, value]."""
    names = {key for row in validation for key in row if key.startswith("validation_")} - {"validation_loss"}
    return {
        name.removeprefix("validation_"): [[row["step"] * tokens, row[name]] for row in validation if name in row]
        for name in sorted(names)
    }


def weights_hash(checkpoint: Path) -> str:
    """SHA-256 (hex) of a checkpoint's weights: equal for equal runs, in whichever folder."""
    return json.loads((checkpoint / checkpoints.MANIFEST).read_text())["files"][checkpoints.MODEL]["sha256"]


def hardware(about: dict[str, str]) -> str:
    """GPUs by name, a CPU with the threads that were used."""
    count = torch.cuda.device_count()
    return f"{count} x {about['device']}" if count else f"{about['device']}, {torch.get_num_threads()} thread(s)"


def portable(config: Config) -> dict[str, Any]:
    """The settings without this machine's folders."""
    tree = copy.deepcopy(config.model_dump(mode="json"))
    tree["run"]["dir"] = Path(tree["run"]["dir"]).name
    tree["data"]["dir"] = Path(tree["data"]["dir"]).name
    for source in tree["data"]["sources"]:
        source["path"] = source["path"] and Path(source["path"]).name
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
        Diverged: as a training in this process does.
    """
    folder = RunFolder(config.run.dir)
    folder.diverged.unlink(missing_ok=True)
    settings = folder.path / "asked.yaml"
    write_text(settings, resolved_yaml(config))
    words = [sys.executable, "-m", "titans_pt.training.launcher", str(settings)]
    # WORLD_SIZE: of this worker's own processes, however many workers a cluster started.
    environment = os.environ | {"TITANS_PROCESSES": str(ranks), "TITANS_NODES": "1", "WORLD_SIZE": "1"}
    with subprocess.Popen(words, env=environment, pass_fds=[claim]) as process:
        before = signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if folder.diverged.exists():
        raise Diverged(folder.diverged.read_text().strip())
    return status
