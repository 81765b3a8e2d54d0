"""The command: plan, prepare what is missing, train and measure it, write the pages."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from titans_pt.data_pipeline import TokenFiles, prepare
from titans_pt.data_pipeline.manifest import read_manifest
from titans_pt.reproduce import page
from titans_pt.reproduce.claims import claim
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import Run
from titans_pt.reproduce.studies import RATES, Order, chosen, runs_of, study
from titans_pt.reproduce.tables import Table
from titans_pt.reproduce.work import work

MFU = (0.4, 0.1)
"""Shares of a GPU's peak for which the plan gives hours: what Transformers reach, and what TNT says of small chunks."""


def reproduce(
    target: str, size: str, order: Order, rates: Sequence[float] | None, ranks: int | None, dry_run: bool
) -> int:
    """``titans reproduce``. Returns 0, or 128 + the signal that stopped it.

    Args:
        rates: learning rates to choose from; None: those of the size.
        ranks: processes of a training; None: one for each GPU, one without.

    Raises:
        UserError: something is wrong with a setting, a record, or the data.
    """
    rates = RATES.get(size, ()) if rates is None else rates
    order = Order(**{**vars(order), "rates": tuple(rates)})
    asked = chosen(study(target, size), order)
    runs, records = runs_of(asked, order), Records(order.out / "records")
    if dry_run:
        print(plan(runs, records).markdown(), end="")
        return 0
    _data(runs[0])

    def write():
        # Every process writes the same from the same records; one at a time.
        with claim(order.out / "claims" / f"{target}.pages") as mine:
            if mine is not None:
                page.write(asked, runs, records, order.out)

    write()
    status = work(runs, order.out, records, ranks or max(1, torch.cuda.device_count()), write)
    if not status:
        for path in page.write(asked, runs, records, order.out):
            print(path)
    return status


def _data(run: Run):
    """Prepares the token files if there are none; titans prepare says what is wrong with those there are."""
    if read_manifest(Path(run.config.data.dir)) is None:
        prepare(run.config, workers=len(os.sched_getaffinity(0)))
    TokenFiles.open(run.config)


def plan(runs: Sequence[Run], records: Records) -> Table:
    """What each run needs, and how far it is; hours are arithmetic, not measurements."""
    hours = [f"H100-hours at {mfu:.0%} MFU" for mfu in MFU]
    table = Table(["run", "parameters", "tokens", "FLOPs", *hours, "checkpoints GiB", "to do"])
    total = {"tokens": 0, "flops": 0.0, "disk": 0}
    for run in runs:
        cost, undone = run.cost, run.missing(run.record(records))
        if "training" in undone:
            total = {key: total[key] + getattr(cost, key) for key in total}
        table.rows.append([
            run.name, f"{cost.parameters:,}", f"{cost.tokens:,}", f"{cost.flops:.3g}",
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
