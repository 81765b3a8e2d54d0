"""Tables from records: what a cell holds, and tables as Markdown and HTML."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from titans_pt.reproduce.figures import BetweenSeeds, Pooled, apart, of_models_and_seeds, pool
from titans_pt.reproduce.measures import TRAINING
from titans_pt.reproduce.published import published
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import Run, loss_of
from titans_pt.reproduce.study import Column, Row, Study
from titans_pt.tools.markdown import markdown_table

NOT_RUN = "not run"
NONE = "-"
"""Mark of a figure that a model cannot have, such as the loss with the memory off for a model without a memory."""


@dataclass(frozen=True)
class Cell:
    """One cell. ours: None if nothing was measured; ``why`` then has the reason. records: records of the seeds in the
    cell. seeds: number of seeds that were trained."""

    row: Row
    column: Column
    paper: float | None
    ours: Pooled | None
    why: str
    records: tuple[dict, ...] = ()
    seeds: int = 0

    @property
    def left_out(self) -> str:
        """Note on trained seeds without a figure: they failed, never reached the value, or were not measured."""
        return f", {len(self.records)} of {self.seeds} seeds" if self.ours and len(self.records) < self.seeds else ""


@dataclass
class Table:
    """Text cells under a head."""

    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        return markdown_table(self.head, self.rows) + "\n"

    def html(self) -> str:
        def line(tag: str, cells: list[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        return f"<table>{line('th', self.head)}{''.join(line('td', row) for row in self.rows)}</table>"


def kept_of(row: Row, runs: Sequence[Run], records: Records) -> dict[int, dict]:
    """Records of a row by seed, all with one learning rate: the best so far at which a whole run was trained.

    Measurements with other settings than the study's count as not measured.
    """
    own = [run.chosen(records) for run in runs if (run.model, run.variant) == (row.model, row.variant)]
    for at_one_rate in zip(*filter(None, own), strict=True):  # a seed that waits for an earlier run has none yet
        found = {run.config.run.seed: (run, records.of(run.name, run.config)) for run in at_one_rate}
        if any(record for _, record in found.values()):
            return {seed: _as_asked(run, record) for seed, (run, record) in found.items() if record}
    return {}


def _as_asked(run: Run, record: dict) -> dict:
    """The record, with only the measurements that used today's settings."""
    measured = record["measured"]
    other = {m.name for m in run.measures if not m.done(measured.get(m.name, {}), run.config)}
    return record | {"measured": {name: found for name, found in measured.items() if name not in other}}


def cells(study: Study, runs: Sequence[Run], records: Records) -> list[Cell]:
    """Every cell of a study's table, row by row; nothing in it is guessed."""
    beside = published(study.target, study.compared)
    found = []
    for row in study.rows:
        kept = kept_of(row, runs, records)
        for column in study.columns:
            paper = beside.value(row.key, column.published) if beside else None
            figures = {
                seed: figure
                for seed, record in kept.items()
                if (result := _result(record, column)) is not None and (figure := column.find(result)) is not None
            }
            ours = pool(figures) if figures else None
            used = tuple(kept[seed] for seed in figures)
            found.append(Cell(row, column, paper, ours, "" if ours else _why(kept, column), used, len(kept)))
    return found


def _result(record: dict, column: Column) -> dict | None:
    """Result that holds a column's figure; None: it was not measured."""
    if column.measure == TRAINING:
        return None if record["failed"] else record["trained"]
    return record["measured"].get(column.measure)


def _why(kept: dict[int, dict], column: Column) -> str:
    """Reason why there is no figure."""
    if not kept:
        return NOT_RUN
    if failed := [record["failed"] for record in kept.values() if record["failed"]]:
        return f"failed ({failed[0]})"
    return NONE if any(_result(record, column) is not None for record in kept.values()) else "not measured"


def overview(study: Study, found: Sequence[Cell]) -> Table:
    """Table with one line per model: our figures, and published figures in brackets."""
    table = Table(["model", "parameters", *(column.title for column in study.columns)])
    for row in study.rows:
        of_row = [cell for cell in found if cell.row == row]
        sizes = {record["trained"]["parameters"] for cell in of_row for record in cell.records}
        shown = [
            (number(cell.ours.mean) if cell.ours else cell.why)
            + cell.left_out
            + (f" ({number(cell.paper)})" if cell.paper else "")
            for cell in of_row
        ]
        table.rows.append([row.name, ", ".join(f"{n:,}" for n in sorted(sizes)) or "-", *shown])
    return table


def details(found: Sequence[Cell]) -> Table:
    """Table with one line per figure: the paper's, ours, and everything that ours rests on.

    Figures that a model cannot have are left out.
    """
    head = ["model", "figure", "paper", "ours", "95 % interval", "n", "seeds", "tokens", "hardware", "checkpoints"]
    table = Table(head)
    for cell in found:
        if cell.why == NONE:
            continue
        paper = "-" if cell.paper is None else number(cell.paper)
        if cell.ours is None:
            table.rows.append([cell.row.name, cell.column.title, paper, cell.why, *["-"] * 6])
            continue
        ours, trained = cell.ours, [record["trained"] for record in cell.records]
        interval = "-" if ours.interval is None else f"{number(ours.interval[0])} to {number(ours.interval[1])}"
        table.rows.append([
            cell.row.name, cell.column.title, paper, number(ours.mean) + cell.left_out, interval, f"{ours.n:,}",
            ", ".join(f"{seed}: {number(value)}" for seed, value in ours.by_seed.items()),
            ", ".join(f"{n:,}" for n in sorted({t["tokens"] for t in trained})),
            ", ".join(sorted({t["hardware"] for t in trained})),
            ", ".join(t["checkpoint"][:12] or "-" for t in trained),
        ])  # fmt: skip
    return table


def behind(study: Study, found: Sequence[Cell]) -> Table | None:
    """Table of the nats by which each model's mean is behind the best model's in a column.

    The 95 % interval covers the streams of the same text and the seeds (:func:`apart`). The last line has the standard
    deviation between seeds, without what a seed does to all models alike. None if no losses by stream were kept.
    """
    columns = []
    for column in study.columns:
        kept = {cell.row: cell.ours for cell in found if cell.column == column and cell.ours}
        seeds = BetweenSeeds.of(kept.values())
        if len(kept := {row: ours for row, ours in kept.items() if len(ours.by_stream) > 1}) > 1:
            nats = of_models_and_seeds(kept).rows
            columns.append((column.title, kept, kept[min(kept, key=nats.__getitem__)], seeds))
    table = Table(["model", *(title for title, *_ in columns)])
    for row in study.rows:
        shown = ["-" if row not in kept else "best" if kept[row] is best else apart(kept[row], best, seeds).told()
                 for _, kept, best, seeds in columns]  # fmt: skip
        if set(shown) - {"-"}:
            table.rows.append([row.name, *shown])
    if not table.rows:
        return None
    between = (f"{math.sqrt(variance):.3f} ({freedom} degrees of freedom)" if freedom else "one seed: left out"
               for variance, freedom in (seeds.own for *_, seeds in columns))  # fmt: skip
    table.rows.append(["standard deviation between seeds", *between])
    return table


def rates(runs: Sequence[Run], records: Records) -> Table | None:
    """Table of how the learning rates were chosen, a line for each choice; None if none was chosen."""
    choosing = {run.choice.row: run for run in runs if run.choice}
    if not choosing:
        return None
    tried = sorted({probe.config.train.lr for run in choosing.values() for probe in run.probes(records)})
    table = Table(["model", *(f"{rate:g}" for rate in tried), "chosen"])
    for row, run in choosing.items():
        shown = dict.fromkeys(tried, NONE)
        for probe in run.probes(records):
            if record := probe.record(records):
                loss = loss_of(record)
                shown[probe.config.train.lr] = f"{loss:.4f}" if math.isfinite(loss) else "failed"
            else:
                shown[probe.config.train.lr] = NOT_RUN
        ready = run.settled(records)
        table.rows.append([row.name, *shown.values(), f"{ready.config.train.lr:g}" if ready else "-"])
    return table


def tenths(runs: Sequence[Run], records: Records) -> Table | None:
    """Table that shows whether probes order learning rates as whole runs do, by their validation losses.

    It has the rows with records of whole runs of the first seed at several rates; None without such a row.
    """
    table = Table(["model", "learning rates", "after the probe", "after the whole run", "same best", "same order"])
    first_seeds: dict[Row, Run] = {}
    for run in runs:
        if run.choice and run.choice.row == Row(run.model, run.variant):
            first_seeds.setdefault(run.choice.row, run)
    for row, run in first_seeds.items():
        losses: dict[float, list[float]] = {}
        for probe in run.probes(records):
            rate, short = probe.config.train.lr, probe.record(records)
            whole = [record for each in (*run.chosen(records), run.at(rate, named=True))
                     if each.config.train.lr == rate and (record := records.of(each.name, each.config))]  # fmt: skip
            if short and whole and all(map(math.isfinite, both := [loss_of(short), loss_of(whole[0])])):
                losses[rate] = both
        if len(losses) < 2:
            continue
        first, last = ([rate for _, rate in sorted((loss[n], rate) for rate, loss in losses.items())] for n in (0, 1))
        shown = [", ".join(f"{loss[n]:.4f}" for loss in losses.values()) for n in (0, 1)]
        same = ("yes" if left == right else "no" for left, right in ((first[0], last[0]), (first, last)))
        table.rows.append([row.name, ", ".join(f"{rate:g}" for rate in losses), *shown, *same])
    return table if table.rows else None


def number(value: float) -> str:
    if abs(value) < 1:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"
