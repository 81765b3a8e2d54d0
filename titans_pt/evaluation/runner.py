"""Runs the evaluations of a checkpoint: results that grow line by line, then one summary, tables and plots.

The task names its suites (``Task.suites``), which are imported on demand. A suite is built with (run, config), which
raises UserError if something is missing. It has ``name``, ``keys`` (one string per job), and

``measure(i) -> dict``  the record of job i;
``summary(records) -> dict``  figures over all records;
``table(summary) -> str`` and ``plots(summary, folder, title) -> list[Path]``  for the reader.
"""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from titans_pt.errors import UserError
from titans_pt.evaluation.caching import check_without_prompts, with_caches
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import LoadedRun, load_run
from titans_pt.runs.wandb_log import send_results
from titans_pt.streaming import best_device
from titans_pt.tasks import Task
from titans_pt.tasks.base import backbone_of
from titans_pt.tools.files import check_room, write_text
from titans_pt.tools.processes import place
from titans_pt.tools.records import RecordFile, read_records
from titans_pt.tools.sealed import read_sealed, seal


def evaluate(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    step: int | None = None,
    suite: str | None = None,
    out: Path | None = None,
    at: Callable[[str], None] = lambda where: None,
    send: Callable[[str, str, Path], None] | None = None,
    finish: Callable[[Callable[[], dict | None]], dict | None] | None = None,
) -> dict | None:
    """Run the evaluations of a run's checkpoint and write their results.

    ``RUN/evaluation/step-XXXXXXXX/`` gets ``NAME.jsonl``, one line per job, and ``summary.json``; ``RUN/plots/`` the
    figures. Jobs that already have a line are not repeated: a killed evaluation continues where it stopped.
    Under torchrun, rank i % world does job i; ranks above 0 write ``NAME-rankR.jsonl``. The last rank, which finds all
    jobs done, writes the summary. Ranks share the folder and do not communicate.

    Args:
        run_dir: folder of a run.
        overrides: ``evaluation.KEY=VALUE`` settings that replace the run's own, and ``data.dir=FOLDER``, where its
            token files are now.
        step: the checkpoint; None is the newest.
        suite: a suite of the task; None runs its usual suites.
        out: folder for ``evaluation/`` and ``plots/`` instead of the run's.
        at: called before each job with a description of it.
        send: called with (name, kind, folder) of the results to send them to W&B (wandb.evaluation), by a training that
            has a W&B run open. None: a W&B run is opened for them.
        finish: called, once this rank's jobs are done, with the function that writes the summary, by a training: its
            ranks do communicate, and one of them calls it. None: each rank calls it.

    Returns:
        the content of summary.json, or None while other ranks are still at work.

    Raises:
        UserError: an unknown suite, another override, or something wrong with the run.
        Busy: another evaluation is at work on a suite in the same folder.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key.partition(".")[0] != "evaluation" and key != "data.dir":
            raise UserError(
                f"override {override!r}: only evaluation.KEY=VALUE and data.dir=FOLDER can be set here; "
                "the rest is the run's"
            )
    if out is None and send is None and Path(run_dir).is_dir():  # load_run refuses all else; a training has no --out
        check_room(Path(run_dir) / "evaluation", "RUN; give --out DIR, a folder that gets the results", folder=True)
    mine = place()
    rank, world = mine.rank, mine.size
    device = best_device(rank if mine.local_rank is None else mine.local_rank)
    if device != "cpu":
        torch.cuda.set_device(device)  # Triton launches on the current device, not on that of its arguments
    # A training has just written the checkpoint: its ranks need not all read it once more to compare checksums.
    run = load_run(run_dir, step=step, device=device, overrides=overrides, content=finish is None)
    if world > 1 and step is None and run.step < run.config.train.max_steps:
        print(f"rank {rank} of {world} takes step {run.step:,} of {run.config.train.max_steps:,}: if the run still "
              f"trains, other ranks may take another; give all --checkpoint {run.step}", file=sys.stderr)  # fmt: skip
    if out is not None:
        run = replace(run, out=RunFolder(out))
    run = with_caches(run)
    if device != "cpu":
        backbone_of(run.model).set_compiled(True)
    if suite is not None and suite not in run.task.suites:
        raise UserError(f"--suite: given {suite!r}; allowed: {', '.join(run.task.suites) or 'none'}")
    folder = run.results.evaluation / f"step-{run.step:08d}"
    evaluations = [_opened(name, run) for name in ([suite] if suite else run.task.usual)]
    for evaluation in evaluations:
        _work(evaluation, run, folder, rank, world, at)

    def summary() -> dict | None:
        found = [read_records(_parts(folder, evaluation.name)) for evaluation in evaluations]
        missing = sum(key not in records for e, records in zip(evaluations, found, strict=True) for key in e.keys)
        if missing:
            print(f"rank {rank} of {world} is done, {missing} samples are left to other ranks: {folder}", flush=True)
            return None
        return _summarise(run, folder, evaluations, found, send)

    return finish(summary) if finish else summary()


def check(task: Task):
    """Build the suites of a training's evaluations (evaluation.every) before the training begins.

    Args:
        task: an opened task.

    Raises:
        UserError: a suite cannot work: a package or a text is missing, or the memories take no caches.
    """
    with torch.device("meta"):
        model = task.build_model()
    config = task.config
    run = with_caches(LoadedRun(RunFolder(config.run.dir), config, model, task, 0, "", config.train.precision))
    for suite in config.evaluation.suites:
        _opened(suite, run)


def _opened(suite: str, run: LoadedRun) -> Any:
    module, _, name = run.task.suites[suite].partition(":")
    kind = getattr(importlib.import_module(module), name)
    if not getattr(kind, "has_prompts", False):
        check_without_prompts(run.config, f"the suite {suite}")
    return kind(run, run.config)


def _parts(folder: Path, name: str) -> list[Path]:
    return sorted([*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}-rank*.jsonl")])


def _work(evaluation: Any, run: LoadedRun, folder: Path, rank: int, world: int, at: Callable[[str], None]) -> None:
    name, origin = evaluation.name, _origin(run)
    if rank >= max(1, len(evaluation.keys)):  # a thousand ranks have few samples: no empty file for each
        return
    own = folder / (f"{name}-rank{rank}.jsonl" if rank else f"{name}.jsonl")
    with RecordFile(own) as file:
        done = read_records(_parts(folder, name))
        # Jobs go to ranks by their place in the whole list: ranks may see different lists of jobs left.
        mine = range(rank, len(evaluation.keys), world)
        todo = [i for i in mine if evaluation.keys[i] not in done]
        pause = 0.5 if sys.stderr.isatty() else 30  # in a log file each update is a line
        bar = tqdm(todo, name, len(mine), initial=len(mine) - len(todo), mininterval=pause, disable=rank > 0)
        for i in bar:
            at(f"{name}, sample {i} of {len(evaluation.keys)}")
            file.append({"key": evaluation.keys[i], **evaluation.measure(i), **origin})


def _origin(run: LoadedRun) -> dict:
    found = {"step": run.step, "checkpoint_hash": run.checkpoint_hash, "precision": run.precision}
    return found if run.caching is None else found | {"caching": run.caching.model_dump(mode="json")}


def _summarise(
    run: LoadedRun, folder: Path, evaluations: list[Any], found: list[dict[str, dict]],
    send: Callable[[str, str, Path], None] | None,
) -> dict:  # fmt: skip
    path = folder / "summary.json"
    parts = {}
    lines = [f"{run.folder.path}, step {run.step}"]
    files, title = [path], f"{run.folder.path.resolve().name}, step {run.step}"
    for evaluation, records in zip(evaluations, found, strict=True):
        summary = evaluation.summary([records[key] for key in evaluation.keys])
        settings = getattr(run.config.evaluation, evaluation.name, None)  # a task's own suite may have none
        shown = {} if settings is None else {"settings": settings.model_dump(mode="json")}
        parts[evaluation.name] = shown | summary
        lines += ["", evaluation.table(summary)]
        files += [*_parts(folder, evaluation.name), *evaluation.plots(summary, run.results.plots, title)]
    whole = _earlier(path, run) | _origin(run) | parts  # read now: another suite may have ended in the meantime
    write_text(path, json.dumps(seal(whole), indent=2) + "\n")
    lines += ["", "files:", *(f"  {file}" for file in files)]
    print("\n".join(lines), flush=True)
    if run.config.wandb.evaluation:
        results = "evaluation", "evaluation", folder
        if send is not None:
            send(*results)
        else:
            send_results(run.config, run.folder, run.results, *results)
    return whole


_ROWS = {
    "by_length": ("length", "mean"), "by_pairs": ("pairs", "mean"), "by_distance": ("distance", "mean"),
    "frozen": ("after", "loss"), "asked": ("needles", "by_length"),
}  # fmt: skip
"""Lists of rows in summary.json -> (entry that names a row, entry that counts)."""


def figures(summary: dict) -> dict[str, float]:
    """Flatten the figures of a summary.json for a log: {"needle.tasks.niah_single_1.by_length.2048.mean": ...}.

    Settings are left out, and lists other than _ROWS.
    """
    found: dict[str, float] = {}
    for key, value in summary.items():
        if isinstance(value, dict) and key != "settings":
            found |= {f"{key}.{name}": number for name, number in figures(value).items()}
        elif isinstance(value, float):
            found[key] = value
        elif isinstance(value, list) and key in _ROWS:
            name, counts = _ROWS[key]
            for row in value:
                own = figures({counts: row.get(counts)})
                found |= {f"{key}.{row[name]}.{figure}": number for figure, number in own.items()}
    return found


def _earlier(path: Path, run: LoadedRun) -> dict:
    """The existing summary, if it is of this checkpoint, precision and caching: a suite replaces only its own part."""
    try:
        earlier = read_sealed(path, "it is written again, with the suites of this call alone") or {}
    except UserError as error:
        print(error, flush=True)
        return {}
    origin = _origin(run)
    return earlier if earlier | origin == earlier and earlier.get("caching") == origin.get("caching") else {}
