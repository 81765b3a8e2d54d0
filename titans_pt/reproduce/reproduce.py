"""The command ``titans reproduce``: plan, prepare missing data, train and measure missing runs, write the pages."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.reproduce import page
from titans_pt.reproduce.claims import claim
from titans_pt.reproduce.order import Order, chosen, run_name, runs_of, seeds_of
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import Run, in_order
from titans_pt.reproduce.study import Study
from titans_pt.reproduce.tables import Table
from titans_pt.reproduce.work import work
from titans_pt.tasks import task_of
from titans_pt.tools.files import check_room
from titans_pt.tools.processes import place
from titans_pt.training.plan import make_plan

MFU = (0.4, 0.1)
"""Shares of a GPU's peak for which the plan gives hours: a Transformer's, and TNT's figure for small chunks."""


def planned(whole: Study, order: Order) -> tuple[Study, list[Run]]:
    """The part of a study that ``order`` asks for, and its runs.

    Raises:
        UserError: there is no such model or setting.
    """
    asked = chosen(whole, order)
    return asked, runs_of(asked, order)


def show_plan(whole: Study, order: Order, ranks: int | None = None, memory: float | None = None):
    """``titans reproduce --dry-run``: prints the plan; writes nothing.

    Args:
        ranks: processes of a training; None: one for each GPU, one without.
        memory: of each of them, in GiB; None: that of this machine's GPUs.

    Raises:
        UserError: a training does not fit into the memory; the plan was printed.
    """
    (_, runs), records = planned(whole, order), Records(order.out / "records")
    print(plan(runs, records).markdown(), end="")
    growing = (run.choice.grid.within for run in runs if run.choice and not run.settled(records))
    if within := next(filter(None, growing), None):
        low, high = within
        print(f"\nMore probes may follow: while a model's best learning rate is the lowest or highest tried, half or "
              f"twice that is tried next, from {low:g} to {high:g}.")  # fmt: skip
    check_memory(runs, records, ranks, memory)


def check_memory(runs: Sequence[Run], records: Records, ranks: int | None, memory: float | None = None):
    """Refuses trainings that do not fit, before any of them begins. Without GPUs and without ``memory`` nothing is
    refused; both arguments are those of :func:`show_plan`.

    Raises:
        UserError: names each run that does not fit, and the remedy of the first.
    """
    if memory is None and not torch.cuda.is_available():
        return
    refused: dict[str, str] = {}
    for run in {(run.model, run.variant): run for run in reversed(runs)}.values():  # seeds need the same memory
        if "training" in run.missing(run.record(records)):
            try:
                make_plan(task_of(run.config), ranks or max(1, torch.cuda.device_count()), gpu=True).check(memory)
            except UserError as error:
                refused = {run.name: str(error)} | refused
    if refused:
        first, *others = refused
        more = f" (likewise {', '.join(others)})" if others else ""
        raise UserError(f"{first}{more}: {refused[first]}")


def reproduce(whole: Study, order: Order, ranks: int | None) -> int:
    """``titans reproduce``. Returns 0, or 128 + the signal that stopped it.

    Args:
        ranks: processes per training; None: one per GPU, or one without a GPU.

    Raises:
        UserError: something is wrong with a setting, a record, or the data; or a launcher started several processes.
    """
    if (size := place().size) > 1:
        raise UserError(f"WORLD_SIZE={size} is set, but this command starts the processes of its trainings itself: "
                        f"start it once, with --ranks {size}, or unset WORLD_SIZE")  # fmt: skip
    (asked, runs), records = planned(whole, order), Records(order.out / "records")
    check_room(order.out, "--out", folder=True)
    check_memory(runs, records, ranks)

    def on_the_page() -> tuple[Study, list[Run]]:
        shown = with_others(order, whole, records)
        return (asked, runs) if shown == order else planned(whole, shown)

    def write_pages() -> list[Path]:
        return page.write(*on_the_page(), records, order.out)

    def write():
        # All processes write the same pages from the same records; only one writes at a time.
        with claim(order.out / "claims" / f"{whole.target}.pages") as mine:
            if mine is not None:
                write_pages()

    for shown in by_data(on_the_page()[1]):
        own = [run for run in runs if run.data == shown[0].data and run.missing(run.record(records))]
        one_text(shown, records, _data(own[0].config) if own and not asked.timed else None)
    write()
    status = work(runs, order.out, records, ranks or max(1, torch.cuda.device_count()), write)
    if not status:
        for path in write_pages():
            print(path)
    return status


def with_others(order: Order, whole: Study, records: Records) -> Order:
    """Order for the pages: the models of ``order``, and all others that have records, as the study sorts them.

    A command for one more model therefore adds to the page and removes nothing from it.
    """
    if order.models is None or whole.timed:
        return order
    there = {row.model for row in whole.rows for seed in seeds_of(whole, row, order)
             if records.names(run_name(row, seed))}  # fmt: skip
    models = dict.fromkeys(row.model for row in whole.rows if row.model in there.union(order.models))
    models |= dict.fromkeys(order.models)  # own models last
    return replace(order, models=list(models))


def by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Group ``runs`` by the data that they read."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(run.data, []).append(run)
    return list(found.values())


def _data(config: Config) -> str:
    """Prepare missing data, check existing data, and return the data's fingerprint."""
    task = task_of(config)
    task.prepare()
    return task.open().identity["data"]


def one_text(runs: Sequence[Run], records: Records, fingerprint: str | None):
    """Check that all runs of a table were trained on the same text.

    Args:
        fingerprint: fingerprint of the token files for the remaining runs; None: no run remains.

    Raises:
        UserError: two runs, or a run and the token files, have different texts.
    """
    known = "the files in data.dir"
    for name in (name for run in in_order(runs, records) for name in records.names(run.name)):
        record = records.read(name)
        was = record and record["trained"].get("data", {}).get("data")
        if not was:
            continue
        fingerprint = fingerprint or was
        if was != fingerprint:
            raise UserError(
                f"{records.path(name)}: trained on other text than {known}, and its figures do not compare; choose "
                "another --out, or delete the records of the one text to train those runs again"
            )
        known = str(records.path(name))


def submit(words: Sequence[str], workers: int, options: Sequence[str]):
    """Queue ``workers`` jobs of one node each under SLURM; each takes runs that no other works on.

    Args:
        words: words of the command line, without --submit.
        options: options for sbatch.

    Raises:
        UserError: there is no sbatch, or it fails.
    """
    script = Path(__file__).parents[1] / "launch" / "slurm_reproduce.sh"
    line = ["sbatch", "--array", f"0-{workers - 1}", *options, str(script), *words]
    try:
        subprocess.run(line, check=True)
    except FileNotFoundError:
        raise UserError("--submit: there is no sbatch here; run it where SLURM is, or leave --submit away") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"--submit: {shlex.join(line)} ended with {error.returncode}; its message is above") from None


def plan(runs: Sequence[Run], records: Records) -> Table:
    """Requirements of each run, and its progress; hours are arithmetic, not measurements."""
    hours = [f"H100-hours at {mfu:.0%} MFU" for mfu in MFU]
    table = Table(["run", "parameters", "tokens", "FLOPs", *hours, "checkpoints GiB", "to do"])
    total = {"tokens": 0, "flops": 0.0, "disk": 0}
    for run in in_order(runs, records):
        ready, cost = run.settled(records), run.cost
        undone = (ready or run).missing(ready.record(records) if ready else None)
        if not ready and any(records.of(each.name, each.config) for each in run.chosen(records)):
            undone = ["training, if its learning rate changes"]
        elif not ready and run.is_a_probe(records):
            undone.remove("training")
        if "training" in undone:
            total = {key: total[key] + getattr(cost, key) for key in total}
        table.rows.append([
            (ready or run).name, f"{cost.parameters:,}", f"{cost.tokens:,}", f"{cost.flops:.3g}",
            *(_hours(cost.gpu_hours(mfu)) for mfu in MFU), f"{cost.disk / 2**30:.2f}", ", ".join(undone) or "nothing",
        ])  # fmt: skip
    ratio = [cost.gpu_hours(mfu) / cost.flops for mfu in MFU]
    table.rows.append([
        "all that is to be trained", "", f"{total['tokens']:,}", f"{total['flops']:.3g}",
        *(_hours(total["flops"] * each) for each in ratio), f"{total['disk'] / 2**30:.2f}", "",
    ])  # fmt: skip
    return table


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
