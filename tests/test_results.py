"""The README and the pages of results say what the records say.

``python -m tests.test_results`` writes their tables again, and draws their pictures."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import pytest
import torch

from titans_pt.layers.state import state_bytes
from titans_pt.models import build_model
from titans_pt.reproduce import pictures
from titans_pt.reproduce.figures import Apart, BetweenSeeds, Pooled, apart, of_models_and_seeds, pool
from titans_pt.reproduce.measures import NEEDLES, text_loss
from titans_pt.reproduce.order import Order
from titans_pt.reproduce.pictures import Picture, Seeds, by_row, needles_asked
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.reproduce import plan, planned
from titans_pt.reproduce.runs import Run
from titans_pt.reproduce.studies import EQUAL_TERMS
from titans_pt.reproduce.studies import study as target_study
from titans_pt.reproduce.study import CHANGES, MODELS, NAMES, TITANS, Column, Row, Study
from titans_pt.reproduce.tables import Cell, behind, cells, kept_of, number, rates
from titans_pt.tools.statistics import effects_of, standard_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
README = ROOT / "README.md"
PAGE, REPRODUCE, TINY, BASELINES, EVALUATION, DNA, FORECASTING, STATES, CONVERSION = (
    ROOT / "docs" / f"{name}.md"
    for name in ("results", "reproduce", "tiny", "baselines", "evaluation", "dna", "forecasting", "statetracking",
                 "conversion")
)  # fmt: skip


def told(cell: Cell) -> str:
    return number(cell.ours.mean) if cell.ours else cell.why


def seeds(cell: Cell) -> str:
    """Each seed's own figure, where there are several."""
    by_seed = cell.ours.by_seed
    return ", ".join(number(by_seed[seed]) for seed in sorted(by_seed)) if len(by_seed) > 1 else "-"


@cache
def found(target: str) -> tuple[Study, list[Run], list[list[Cell]]]:
    """A study, its runs, and the cells of every row of which something was run."""
    study, runs = planned(target_study(target, "tiny"), Order(Path("out")))
    each = cells(study, runs, Records(RESULTS / "records"))
    rows = [[cell for cell in each if cell.row == row] for row in study.rows]
    return study, runs, [row for row in rows if row[0].ours]


def line(*shown: str) -> str:
    return f"| {' | '.join(shown)} |"


def lowest_first(rows: list[list[Cell]]) -> list[list[Cell]]:
    """Rows by their first column, as it would be if all had the same seeds."""
    order = of_models_and_seeds({n: row[0].ours for n, row in enumerate(rows)}).rows
    return [rows[n] for n in sorted(order, key=order.__getitem__)]


def rate_of(run: Run, records: Records, record: dict) -> str:
    """The learning rate of a record; with a sign while a probe of another is open, or its whole run."""
    lr, ready = record["trained"]["lr"], run.settled(records)
    best = ready.config.train.lr if ready else run.choice.progress(records)[0].missing[0]
    return f"{'≥ ' * (best > lr)}{'≤ ' * (best < lr)}{lr:.1e}".replace("e-0", "e-").replace(".0e", "e")


def models() -> list[str]:
    """The learning rate, the mean over seeds, each seed, how far behind the best on the same text, and the others."""
    study, runs, rows = found("table1")
    records, of_model = Records(RESULTS / "records"), {run.model: run for run in runs}
    apart = {name: by for name, by, *_ in behind(study, [cell for row in rows for cell in row]).rows}
    text = []
    for first, *others in lowest_first(rows):
        row, run = first.row, of_model[first.row.model]
        rate = rate_of(run, records, first.records[0])
        text.append(line(row.name, rate, told(first), seeds(first), apart.get(row.name, "-"), *map(told, others),
                         f"{state_of(run):,}", f"{run.cost.flops / 1e13:.1f}"))  # fmt: skip
    return text


@torch.no_grad()
def state_of(run: Run) -> int:
    """Numbers of state a layer of a run's model, after a row of training."""
    config = run.config
    _, state = build_model(config.model)(torch.zeros(1, config.data.seq_len, dtype=torch.int64))
    return state_bytes(state) // 4 // config.model.n_layers


def learning_rates() -> list[str]:
    """Losses of the probes, one model a line."""
    _, runs, _ = found("table1")
    return [line(*row) for row in rates(runs, Records(RESULTS / "records")).rows]


def larger_rates() -> list[str]:
    """Validation losses of models of four times the size after a tenth of the tokens, by learning rate, and the rate of
    their whole runs. Models whose three first rates were tried."""
    text = []
    for model in dict.fromkeys(row.model for row in found("scaling")[0].rows):
        tried = {}
        for path in (RESULTS / "records").glob(f"{model}-size-4x-lr*.json"):
            trained = json.loads(path.read_text())["trained"]
            tried[trained["lr"]] = trained["validation_loss"]
        if len(tried) >= 3:
            best, whole = min(tried.values()), json.loads((RESULTS / f"records/{model}-size-4x-s0.json").read_text())
            losses = (tried.get(rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3))
            shown = ("-" if loss is None else f"**{loss:.4f}**" if loss == best else f"{loss:.4f}" for loss in losses)
            text.append(line(Row(model).name, *shown, f"{whole['trained']['lr']:g}"))
    return text


def whole_at_rates() -> list[str]:
    """Models with whole runs of seed 0 at several rates: the loss of each rate's probe, the whole run, and nats to the
    rate that the probes choose."""
    runs = [*found("table1")[1], *(run for run in found("scaling")[1] if run.choice.row.variant)]
    records, text = Records(RESULTS / "records"), []
    for run in (run for run in runs if run.config.run.seed == 0):
        probes = {probe.config.train.lr: probe.record(records) for probe in run.probes(records)}
        whole = {record["trained"]["lr"]: record for record in map(records.read, records.names(run.name))}
        if len(whole) < 2:
            continue
        chosen = run.settled(records).config.train.lr
        rates = sorted(whole)
        columns = [[], []]
        for column, (title, measure) in zip(columns, (("perplexity", "text"), ("to 16K", "long")), strict=True):
            losses = {lr: pool({0: text_loss(whole[lr]["measured"][measure])}) for lr in rates}
            column += [(number(losses[lr].mean), behind_at(losses[lr], losses[chosen], title)) for lr in rates]
        text += [line(run.choice.row.name, f"{lr:g}", f"{probes[lr]['trained']['validation_loss']:.4f}", *near, *far)
                 for lr, near, far in zip(rates, *columns, strict=True)]  # fmt: skip
    return text


def behind_at(own: Pooled, best: Pooled, column: str) -> str:
    """Nats by which ``own`` is behind ``best``, of the same seeds; with an interval where the losses of all streams
    were kept (early records have their mean alone)."""
    if own is best:
        return "+0.000"
    if len(own.by_stream) == len(best.by_stream) > 1:
        return apart(own, best, between(column)).told("+")
    return f"{math.log(own.mean / best.mean):+.3f}"


def variants(target: str) -> dict[str, list[Cell]]:
    """The cells of an LMM and of its variants."""
    return {row[0].row.variant: row for row in found(target)[2] if row[0].row.model == "lmm"}


def of_text(column: str) -> list[Pooled]:
    """A column's figures of all models and variants of the studies of text."""
    rows = {cell.row: cell.ours for target in ("table1", "table5") for row in found(target)[2] for cell in row
            if cell.column.title == column and cell.ours}  # fmt: skip
    return list(rows.values())


def between(column: str) -> BetweenSeeds:
    """Variances of a column's nats between seeds, pooled over :func:`of_text`."""
    return BetweenSeeds.of(of_text(column))


def on_same_seeds(rows: dict[str, Cell]) -> dict[str, str]:
    """Nats by which each variant is behind the complete model in one column, from the seeds that both have."""
    whole = rows[""].ours
    return {"": "+0.000"} | {
        variant: behind_at(cell.ours, whole, cell.column.title)
        for variant, cell in rows.items() if variant and cell.ours.figures.keys() & whole.figures.keys()
    }  # fmt: skip


def ablations() -> list[str]:
    """Costs of each change, in nats and in those of the paper, and the other figures; the costliest last."""
    rows = variants("table5")
    near, far = (on_same_seeds({variant: row[n] for variant, row in rows.items()}) for n in (0, 1))
    whole = rows[""][0]
    return [
        line(
            CHANGES.get(variant, "LMM"), ", ".join(map(str, first.ours.by_seed)), told(first), near[variant],
            f"{math.log(first.paper / whole.paper):+.3f}", told(others[0]), far[variant], *map(told, others[1:]),
        )
        for variant, (first, *others) in sorted(rows.items(), key=lambda item: float(near[item[0]].split()[0]))
    ]  # fmt: skip


def later_ideas() -> list[str]:
    """Ideas published after Titans, the best first: nats to the complete LMM, or MAC, on seeds that both have."""
    study, runs, rows = found("ideas")
    records, run_of = Records(RESULTS / "records"), {(run.model, run.variant): run for run in runs}
    base = {row[0].row.model: row for row in rows if not row[0].row.variant}
    text = []
    for first, far, *others in lowest_first([row for row in rows if row[0].row not in study.rows[:2]]):
        row = first.row
        whole = base["mac" if row.model == "mac" else "lmm"]
        near, away = (on_same_seeds({"": whole[n], "idea": cell})["idea"] for n, cell in enumerate((first, far)))
        rate = rate_of(run_of[row.model, row.variant], records, first.records[0])
        shown = (row.name, rate, ", ".join(map(str, first.ours.by_seed)), told(first), near, told(far), away)
        text.append(line(*shown, *map(told, others)))
    return text


def filters() -> list[str]:
    """Each model as it is, and with the other start of its values' filters."""
    return in_two_ways("filters", lambda model, other: "identity" if (model in TITANS) != other else "random")


def optimizers() -> list[str]:
    """Each model by AdamW and by Muon."""
    return in_two_ways("optimizer", lambda _model, other: "Muon" if other else "AdamW")


def in_two_ways(study: str, way: Callable[[str, bool], str]) -> list[str]:
    """Each model of ``study`` with records of both ways, as it is and in its other way; ``way(model, other)`` names
    them."""
    rows = [row for row in found(study)[2] if row[0].ours]
    own = {row[0].row.model: row for row in rows if not row[0].row.variant}
    both = {row[0].row.model for row in rows if row[0].row.variant}
    text = []
    for row in rows:
        model, other = row[0].row.model, row[0].row.variant
        if model not in both:
            continue
        shown = [way(model, bool(other))]
        for plain, cell in zip(own[model][:2], row[:2], strict=True):
            shown += [told(cell), on_same_seeds({"": plain} | ({other: cell} if other else {}))[other]]
        text.append(line(NAMES[model], *shown))
    return text


def states_compared() -> list[str]:
    """Models with their own states, with smaller and with larger ones, the best first: nats to the LMM on the same
    seeds."""
    _, runs, rows = found("states")
    run_of = {(run.model, run.variant): run for run in runs}
    whole = next(row for row in rows if row[0].row.key == "lmm")
    text = []
    for row in lowest_first(rows):
        run = run_of[row[0].row.model, row[0].row.variant]
        own = "" if row is whole else "own"
        near, far = (on_same_seeds({"": whole[n], own: row[n]})[own] for n in (0, 1))
        shown = ", ".join(map(str, row[0].ours.by_seed)), told(row[0]), near, told(row[1]), far
        text.append(line(row[0].row.name, f"{state_of(run):,}", f"{run.cost.flops / 1e13:.1f}", *shown))
    return text


def scaled() -> list[str]:
    """Models with more tokens or parameters beside the same models without, the best of each group first; nats behind
    the group's best, on the seeds that both have."""
    rows = found("scaling")[2]
    grown = {row[0].row.model for row in rows if row[0].row.variant}
    text = []
    for variant in ("", "tokens-4x", "size-4x"):
        group = lowest_first([row for row in rows if row[0].row.variant == variant and row[0].row.model in grown])
        for row in group:
            trained = row[0].records[0]["trained"]
            shown = (row[0].row.name, f"{trained['parameters']:,}", f"{trained['tokens']:,}",
                     ", ".join(map(str, row[0].ours.by_seed)))  # fmt: skip
            key = "" if row is group[0] else "own"
            near, far = (on_same_seeds({"": group[0][n], key: row[n]})[key] for n in (0, 1))
            longest = "-", "-"
            if row[2].ours:
                own, best = row[2].ours.figures, group[0][2].ours.figures
                gaps = [own[seed].value - best[seed].value for seed in own.keys() & best.keys()]
                longest = told(row[2]), f"{fmean(gaps):+.3f}"
            text.append(line(*shown, told(row[0]), near, told(row[1]), far, *longest))
    return text


def depths() -> list[str]:
    """Perplexity by the length of the text, one depth a line, and the nats to depth 2 over the whole text."""
    study, runs, _ = found("figure7")
    whole = replace(study, columns=(Column("to 16K", "long", text_loss),))
    far = on_same_seeds({cell.row.variant: cell for cell in cells(whole, runs, Records(RESULTS / "records"))})
    return [
        line(variant[-1:] or "2", ", ".join(map(str, row[0].ours.by_seed)), *map(told, row), far[variant])
        for variant, row in variants("figure7").items()
    ]


def chunks() -> list[str]:
    """Perplexity by the chunk of evaluation, one chunk of training a line."""
    return [line(variant[len("chunk-") :] or "16", *map(told, row)) for variant, row in variants("chunks").items()]


def throughput() -> list[str]:
    """The fastest at the shortest length first."""
    rows = found("figure9")[2] + [row for row in found("figure8")[2] if row[0].row.variant]
    return [line(row[0].row.name, *map(told, row)) for row in reversed(lowest_first(rows))]


def of_rows(folder: str, rows: Iterable[Row], rates: bool = False) -> dict[str, list[dict]]:
    """The records of each row that has some, by its name, seed by seed.

    rates: also records at other learning rates than the config's, whose names have the rate.
    """
    kept = [json.loads(path.read_text()) for path in (RESULTS / folder).glob("*.json")
            if rates or "-lr" not in path.stem]  # fmt: skip
    found = {}
    for row in rows:
        own = [record for record in kept if (record["model"], record["variant"]) == (row.model, row.variant)]
        if own:
            found[row.name] = sorted(own, key=lambda record: record["seed"])
    return found


def of_models(folder: str) -> list[list[dict]]:
    """The records of each model as it is, seed by seed."""
    return list(of_rows(folder, map(Row, sorted(MODELS))).values())


def spanned(percent: list[float]) -> str:
    """The mean over seeds and, where they differ, the lowest and the highest."""
    low, high, mean = f"{min(percent):.1f}", f"{max(percent):.1f}", f"{sum(percent) / len(percent):.1f}"
    return mean if low == high else f"{mean} ({low} to {high})"


def recalled() -> list[str]:
    """A line for each model, the most accurate first."""
    return lines_of_recall(of_rows("recall", map(Row, MODELS)))


def ideas_recalled() -> list[str]:
    """LMM, MAC and each later idea, the most accurate first."""
    return lines_of_recall(of_rows("recall", target_study("ideas", "tiny").rows))


def first_at_95(record: dict) -> str:
    """The first step with 95 % of the validation samples right."""
    batch = record["config"]["train"]["batch_tokens"]
    reached = (n // batch for n, share in record["trained"]["figures"]["accuracy"] if share >= 0.95)
    return f"{step:,}" if (step := next(reached, None)) else "-"


def lines_of_recall(rows: dict[str, list[dict]]) -> list[str]:
    lines = []
    for name, seeds in rows.items():
        each = [100 * record["measured"]["recall"]["mean"] for record in seeds]
        steps, first = [f"{record['trained']['steps']:,}" for record in seeds], map(first_at_95, seeds)
        most = seeds[0]["config"]["train"]["max_steps"]
        shown = line(
            name, ", ".join(str(record["seed"]) for record in seeds), spanned(each), ", ".join(first),
            f"{', '.join(steps)} of {most:,}", f"{seeds[0]['trained']['parameters']:,}",
        )  # fmt: skip
        lines.append((-sum(each) / len(each), shown))
    return [shown for _, shown in sorted(lines)]


def found_in_noise() -> list[str]:
    """A line for each model, the most needles at the longest length that all were asked at first."""
    return lines_of_needles(of_rows("needles", map(Row, MODELS)), (2048, 16384, 65536, 1048576))


def ideas_in_noise() -> list[str]:
    """LMM, MAC and each later idea, in the same order."""
    return lines_of_needles(of_rows("needles", target_study("ideas", "tiny").rows), (2048, 16384, 65536, 1048576))


def on_equal_terms() -> list[str]:
    """Rows with other gates, a cost of writing or one part less, beside the models as they are."""
    changed = of_rows("needles", EQUAL_TERMS)
    models = sorted({seeds[0]["model"] for seeds in changed.values()})
    return lines_of_needles(of_rows("needles", map(Row, models)) | changed, (2048, 16384, 65536, 1048576))


def at_rates(folder: str) -> Iterator[tuple[str, dict, str, str]]:
    """Seed 0 of models that were trained at several rates: name, record, rate and validation loss, rate by rate. The
    model's best rate is in bold; a star marks the earlier trainer, whose records have no loss."""
    for name, records in of_rows(folder, map(Row, MODELS), rates=True).items():
        first = sorted(
            (record for record in records if record["seed"] == 0), key=lambda record: record["trained"]["lr"]
        )
        losses = [record["trained"]["validation_loss"] for record in first]
        known = [loss for loss in losses if loss is not None]
        for record, loss in zip(first, losses, strict=True) if len(first) > 1 else ():
            rate = f"{record['trained']['lr']:g}" + ("" if "crc32" in record else r"\*")
            best = len(known) > 1 and loss == min(known)
            yield name, record, f"**{rate}**" if best else rate, "-" if loss is None else f"{loss:.4f}"


def found_at_rates() -> list[str]:
    """A line for each rate."""
    lines = []
    for name, record, rate, loss in at_rates("needles"):
        at = {cell["length"]: f"{100 * cell['mean']:.1f}" for row in needles_asked(record) for cell in row["by_length"]}
        lines.append(line(name, rate, loss, *(at.get(length, "-") for length in (2048, 16384, 65536, 1048576))))
    return lines


def recalled_at_rates() -> list[str]:
    """A line for each rate."""
    return [
        line(name, rate, loss, f"{100 * record['measured']['recall']['mean']:.1f}",
             first_at_95(record), f"{record['trained']['steps']:,}")
        for name, record, rate, loss in at_rates("recall")
    ]  # fmt: skip


def lines_of_needles(rows: dict[str, list[dict]], lengths: Sequence[int]) -> list[str]:
    """A star marks the steps of the earlier, separate trainer, whose records have no checksum."""
    lines = []
    for name, seeds in rows.items():
        cells: dict[int, list[float]] = {}
        for record in seeds:
            for row in needles_asked(record):
                for cell in row["by_length"] if (row["needles"], row["noise"]) == (8, "seen") else ():
                    cells.setdefault(cell["length"], []).append(100 * cell["mean"])
        shown = line(
            name, f"{seeds[0]['trained']['parameters']:,}", ", ".join(str(record["seed"]) for record in seeds),
            ", ".join(f"{record['trained']['steps']:,}{'' if 'crc32' in record else '*'}" for record in seeds),
            *(spanned(cells[length]) if length in cells else "-" for length in lengths),
        )  # fmt: skip
        lines.append((-sum(cells[65536]) / len(cells[65536]), -sum(cells[16384]) / len(cells[16384]), shown))
    return [shown for *_, shown in sorted(lines)]


def stories() -> list[str]:
    """A line for each model, seed and task: right answers, of those asked, and nats per token of the answer."""
    lines = []
    for name, records in of_rows("babilong", target_study("babilong", "tiny").rows).items():
        for record in records:
            for task in record["config"]["babilong"]["tasks"]:
                of_task = [found["tasks"][task]["by_length"] for found in record["measured"].values()]
                cells = {cell["length"]: cell for rows in of_task for cell in rows}
                shown = (f"{cell['mean'] * cell['n']:.0f} of {cell['n']} ({cell['answer_nll']:.2f})" if cell else "-"
                         for cell in map(cells.get, (4096, 16384, 65536, 1048576)))  # fmt: skip
                lines.append(line(name, str(record["seed"]), task, *shown))
    return lines


@cache
def answers_of_ruler() -> list[dict]:
    return list(map(json.loads, (RESULTS / "ruler/needles.jsonl").read_text().splitlines()))


def of_ruler(
    stage: str, cachings: Sequence[str | None], task: str, lengths: Sequence[int], seed: int = 0
) -> list[dict]:
    """Answers of configs/ruler's model after a stage, read with these caches."""
    return [row for row in answers_of_ruler() if row["stage"] == stage and row["caching"] in cachings
            and row["task"] == task and row["length"] in lengths and row.get("seed", 0) == seed]  # fmt: skip


def percent_found(rows: list[dict]) -> str:
    return f"{100 * sum(row['score'] for row in rows) / len(rows):.0f}"


def answer_nats(rows: list[dict]) -> float:
    return sum(row["answer_nll"] for row in rows) / len(rows)


def needle_cell(right: float, n: int, nats: float, digits: int) -> str:
    """Needles found, of n asked for, and nats per token of the answer, of which ``nats`` is the sum over n."""
    return f"{right:.0f} of {n} ({nats / n:.{digits}f})" if n else "-"


RULER_LENGTHS = (2048, 2053, 16384, 16389, 131072, 131077, 1048576)


def needles_in_text() -> list[str]:
    lines = []
    for task, hay in (("niah_single_1", "noise"), ("niah_single_2", "essays")):
        cells = [of_ruler("3", [None], task, [length]) for length in RULER_LENGTHS]
        lines.append(line(f"{task}, {hay}", *map(percent_found, cells)))
        lines.append(line("", *(f"{answer_nats(rows):.3f}" for rows in cells)).replace("|  |", "| |"))
    return lines


CHANGED = "{shares: change, fresh: true, segment: 1024, slots: 128, last: 64}"
MANY = "{segment: 1024, slots: N, last: 64}"
EACH_LENGTH = [MANY.replace("N", slots) for slots in ("16", "128", "1024")]
STATES_READ: tuple[tuple[str, int, str, Sequence[str | None]], ...] = (
    ("3", 0, "as trained", [None]),
    ("3", 0, f"`{CHANGED}`", [CHANGED]),
    ("4", 0, f"`{MANY}`", EACH_LENGTH),
    ("4", 1, f"`{MANY}`", EACH_LENGTH),
)
"""Stage, seed, memory as docs/evaluation.md names it, and its caches."""


def needles_with_states() -> list[str]:
    lines = []
    for stage, seed, memory, cachings in STATES_READ:
        cells = []
        for lengths in (RULER_LENGTHS[2:4], RULER_LENGTHS[4:6], RULER_LENGTHS[6:]):
            rows = of_ruler(stage, cachings, "niah_single_2", lengths, seed)
            right, nats = (sum(row[key] for row in rows) for key in ("score", "answer_nll"))
            cells.append(needle_cell(right, len(rows), nats, 3))
        lines.append(line(f"stage {stage}" + (f", seed {seed}" if seed else ""), memory, *cells))
    return lines


def stages_of_ruler() -> list[str]:
    """The first line is that of an earlier trainer, of which no records are left (docs/notebook.md)."""
    earlier = "next tokens of documents with the same sentences (`titans ruler`), digits in a stage of their own"
    lines = [line(earlier, "120", "25", "0")]
    for stage, name, minutes in (("1", "answers, Python's documentation, to 2,048 tokens", 13),
                                 ("2", "then Debian's documentation, to 4,096 tokens", 29),
                                 ("3", "and then one of four keys", 40)):  # fmt: skip
        cells = (
            ", ".join(percent_found(of_ruler(stage, [None], "niah_single_2", [length])) for length in lengths)
            for lengths in (RULER_LENGTHS[:2], RULER_LENGTHS[2:4])
        )
        lines.append(line(name, f"{minutes}", *cells))
    return lines


def models_after_stages() -> list[str]:
    """A line for each stage and model: needles found, of those asked for, and nats per token of the answer. The LMM's
    answers of seed 0 are those of the other tables."""
    tasks, pairs = NEEDLES[:2], [RULER_LENGTHS[n : n + 2] for n in (0, 2, 4)]
    stages: dict[tuple[str, str], dict[str, list[dict]]] = {
        (stage, NAMES["lmm"]): {
            task: [row | {"n": 1, "mean": row["score"]} for row in of_ruler(stage, [None], task, RULER_LENGTHS)]
            for task in tasks
        }
        for stage in "123"
    }
    for record in (each for own in of_rows("ruler", target_study("ruler", "tiny").rows).values() for each in own):
        measured = [record["measured"][name]["tasks"] for name in ("near", "long") if name in record["measured"]]
        name = NAMES[record["model"]] + (f", seed {record['seed']}" if record["seed"] else "")
        stages[record["variant"].removeprefix("stage-"), name] = {
            task: [row for of_task in measured for row in of_task[task]["by_length"]] for task in tasks
        }
    lines = []
    for (stage, name), of_task in sorted(stages.items(), key=lambda item: item[0][0]):
        cells = []
        for task in tasks:
            for pair in pairs:
                found = [cell for cell in of_task[task] if cell["length"] in pair]
                n = sum(cell["n"] for cell in found)
                right, nats = (sum(cell["n"] * cell[key] for cell in found) for key in ("mean", "answer_nll"))
                cells.append(needle_cell(right, n, nats, 2))
        lines.append(line(stage, name, *cells))
    return lines


OVERVIEW = ("mac", "lmm", "mamba2", "gated_deltanet", "ttt_mlp", "transformer")
"""The six rows of the README's table."""


def overview() -> list[str]:
    """A line for each model of the README: the first columns of the other tables, means over seeds."""
    text = {row[0].row.model: row for row in found("table1")[2] if not row[0].row.variant}
    recall = {seeds[0]["model"]: seeds for seeds in of_models("recall")}
    needles = {seeds[0]["model"]: seeds for seeds in of_models("needles")}
    lines = []
    for model in OVERVIEW:
        asked = [cell["mean"] for record in needles[model] for row in needles_asked(record)
                 if (row["needles"], row["noise"]) == (8, "seen") for cell in row["by_length"]
                 if cell["length"] == 65536]  # fmt: skip
        recalls = [record["measured"]["recall"]["mean"] for record in recall[model]]
        means = (f"{100 * sum(each) / len(each):.1f}" for each in (asked, recalls))
        lines.append(line(NAMES[model], *map(told, text[model][:2]), *means))
    return lines


SHOWN = ("mac", "lmm", "mag", "mamba2", "mal", "gated_deltanet", "deltanet", "ttt_mlp", "swa", "transformer")
"""The rows of docs/results.md."""


def models_in_short() -> list[str]:
    """The best first, of the models that are shown."""
    study, _, rows = found("table1")
    apart = {name: by for name, by, *_ in behind(study, [cell for row in rows for cell in row]).rows}
    return [
        line(first.row.name, str(len(first.ours.by_seed)), told(first), apart.get(first.row.name, "-"),
             told(others[0]), told(others[1]))
        for first, *others in lowest_first(rows) if first.row.model in SHOWN and not first.row.variant
    ]  # fmt: skip


def asked_in_short() -> list[str]:
    """Needles by length, the most at 65,536 tokens first, and recall; both from the same seeds or the first alone."""
    recall = {seeds[0]["model"]: seeds for seeds in of_models("recall")}
    lines = []
    for seeds in of_models("needles"):
        if (model := seeds[0]["model"]) not in SHOWN:
            continue
        at: dict[int, list[float]] = {}
        for record in seeds:
            for row in needles_asked(record):
                for cell in row["by_length"] if (row["needles"], row["noise"]) == (8, "seen") else ():
                    at.setdefault(cell["length"], []).append(100 * cell["mean"])
        means = [sum(at[length]) / len(at[length]) if length in at else None for length in (2048, 65536, 1048576)]
        recalls = [100 * record["measured"]["recall"]["mean"] for record in recall[model]]
        shown = line(NAMES[model], str(len(seeds)), *("-" if mean is None else f"{mean:.1f}" for mean in means),
                     f"{sum(recalls) / len(recalls):.1f}")  # fmt: skip
        lines.append((-means[1], -means[0], shown))
    return [shown for *_, shown in sorted(lines)]


def ablations_in_short() -> list[str]:
    """The first columns of the ablations, without intervals."""
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in ablations())
    return [
        line("nothing" if name == "LMM" else name.removeprefix("without "), seeds, near, cost, *rest)
        for name, seeds, near, cost, *rest in ((*row[:5], row[5]) for row in cells)
    ]


def needles_shown() -> Seeds:
    """The README's picture: an LMM trained with a cost on writing, and others of its size."""
    shown = {"LMM": [json.loads((RESULTS / "titans/lmm-s1.json").read_text())]}
    others = {seeds[0]["model"]: seeds for seeds in of_models("needles")}
    for model in ("ttt_mlp", "ttt_linear", "deltanet", "mamba2", "transformer"):
        shown[NAMES[model]] = others[model]
    return shown | {"sliding window": [json.loads((RESULTS / "titans/swa-s0.json").read_text())]}


def of_study(target: str, folder: str) -> Seeds:
    """Records of a study's rows by name, as its page shows them."""
    asked, runs = planned(target_study(target, "tiny"), Order(Path("out")))
    kept = Records(RESULTS / folder)
    return by_row([(row.name, record) for row in asked.rows for record in kept_of(row, runs, kept).values()])


def baselines(folder: str) -> Seeds:
    return of_rows(folder, map(Row, MODELS))


PICTURES: dict[str, tuple[Callable[[], Seeds], Picture, str]] = {
    "needles.png": (needles_shown, pictures.needles, "8-seen"),
    "results/tiny-positions.png": (partial(of_study, "table1", "records"), pictures.positions, "positions"),
    "results/tiny-longer.png":
        (partial(of_study, "scaling", "records"), partial(pictures.positions, measure="longer"), "positions"),
    "results/tiny-training.png": (partial(of_study, "table1", "records"), pictures.training, "training"),
    "results/baselines-needles.png": (partial(baselines, "needles"), pictures.needles, "8-seen"),
    "results/baselines-recall.png": (partial(baselines, "recall"), pictures.recall, "accuracy"),
    "results/dna-classes.png": (partial(of_study, "table4", "dna"), pictures.classes, "classes"),
    "results/forecast-elecdemand.png": (partial(of_study, "table3", "forecast"), pictures.forecasts, "elecdemand"),
    "results/forecast-simbench-generation.png":
        (partial(of_study, "table3", "forecast"), pictures.forecasts, "simbench-generation"),
    "results/statetracking-lengths.png":
        (partial(of_study, "statetracking", "state_tracking"), pictures.states, "lengths"),
}  # fmt: skip
"""Pictures of docs/: the records that they show, what draws them, and the end of the name that it gives to this one."""
DRAWN = RESULTS / "pictures.json"
"""Digest of the records that each picture was drawn from."""


def digest_of(shown: Seeds) -> str:
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def draw(name: str) -> str:
    """Draws a picture of docs/; returns the digest of its records."""
    records, drawn_by, end = PICTURES[name]
    with TemporaryDirectory() as folder:
        (picture,) = [path for path in drawn_by(records(), Path(folder) / "x") if path.stem == f"x-{end}"]
        (ROOT / "docs" / name).write_bytes(picture.read_bytes())
    return digest_of(records())


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_was_drawn_from_the_records_that_there_are(name):
    assert json.loads(DRAWN.read_text())[name] == digest_of(PICTURES[name][0]()), "run python -m tests.test_results"


FULL_SIZE = ("table1 340m", "table1 760m", "table2 340m", "table5 400m", "figure7 340m", "chunks 340m", "babilong 340m")


def costs() -> list[str]:
    """Costs of studies of full size, from the last line of their plans."""
    lines = []
    for target, size in map(str.split, FULL_SIZE):
        _, runs = planned(target_study(target, size), Order(Path("out")))
        _, _, *total, _ = plan(runs, Records(Path("none"))).rows[-1]
        lines.append(line(f"`titans reproduce {target} --size {size} --dry-run`", f"{len(runs)}", *total))
    return lines


def of_dna() -> dict[str, list[dict]]:
    """Records of table4 by variant, in the study's order."""
    asked, runs = planned(target_study("table4", "tiny"), Order(Path("out")))
    records = Records(RESULTS / "dna")
    found: dict[str, list[dict]] = {row.variant: [] for row in asked.rows}
    for row in asked.rows:
        found[row.variant] += [record for run in runs if (run.model, run.variant) == (row.model, row.variant)
                               and (record := run.record(records))]  # fmt: skip
    return found


def read_genomes() -> list[str]:
    """The lowest loss first."""
    lines = []
    for model in ("lmm", "mamba2", "transformer"):
        found = [json.loads(path.read_text()) for path in sorted((RESULTS / "dna").glob(f"{model}-pretrain-s*.json"))]
        losses, trained = [record["measured"]["text"]["loss"] for record in found], found[0]["trained"]
        seeds = ", ".join(str(record["seed"]) for record in found)
        shown = line(NAMES[model], f"{trained['parameters']:,}", f"{trained['tokens']:,}", seeds,
                     ", ".join(f"{loss:.4f}" for loss in losses))  # fmt: skip
        lines.append((min(losses), shown))
    return [shown for _, shown in sorted(lines)]


def classified() -> list[str]:
    """Each set's models and baselines, the most accurate first."""
    by_variant, text = of_dna(), []
    for name in ("coding", "splice"):
        lines, baselines = [], {}
        starts = {"pretrained": "", "from scratch": "-scratch", "pretrained, memory off": "-memory-off",
                  "from scratch, memory off": "-scratch-memory-off"}  # fmt: skip
        for start, suffix in starts.items():
            for model in dict.fromkeys(record["model"] for record in by_variant[name + suffix]):
                seeds = sorted((r for r in by_variant[name + suffix] if r["model"] == model), key=lambda r: r["seed"])
                results = [record["measured"]["classes"] for record in seeds]
                baselines = results[0]["baselines"]
                each = [100 * result["columns"]["test"]["mean"] for result in results]
                new = [100 * r["columns"]["distinct"]["mean"] for r in results if "distinct" in r["columns"]]
                mcc = [result["columns"]["test"]["mcc"] for result in results]
                shown = line(
                    name, NAMES[model], start, ", ".join(str(record["seed"]) for record in seeds),
                    f"{sum(each) / len(each):.1f}", ", ".join(f"{x:.1f}" for x in each),
                    f"{sum(new) / len(new):.1f}" if new else "-", f"{sum(mcc) / len(mcc):.3f}",
                )  # fmt: skip
                lines.append((-sum(each) / len(each), shown))
        for kind, columns in baselines.items():
            new = f"{100 * columns['distinct']['accuracy']:.1f}" if "distinct" in columns else "-"
            test = columns["test"]
            shown = line(name, f"*{kind}*", "-", "-", f"{100 * test['accuracy']:.1f}", "-", new, f"{test['mcc']:.3f}")
            lines.append((-100 * test["accuracy"], shown))
        text += [shown for _, shown in sorted(lines)]
    return text


def forecasts() -> list[str]:
    """Rows of table3 that have records, means over seeds: by series, horizon and lookback, the lowest error first."""
    asked, runs = planned(target_study("table3", "tiny"), Order(Path("out")))
    records, lines = Records(RESULTS / "forecast"), []
    for row in asked.rows:
        found = [record for run in runs if (run.model, run.variant) == (row.model, row.variant)
                 and (record := run.record(records))]  # fmt: skip
        if not found:
            continue
        seeds = ", ".join(str(record["seed"]) for record in found)
        measured = [record["measured"]["forecast"] for record in found]
        ours = [(m["rows"]["model"]["mse"], m["rows"]["model"]["mae"], m["rows"]["ridge on the lookback"]["mse"],
                 m["streamed"]["carried"]["mse"], m["streamed"]["fresh"]["mse"]) for m in measured]  # fmt: skip
        means = [sum(values) / len(values) for values in zip(*ours, strict=True)]
        place = *(measured[0][key] for key in ("series", "horizon", "lookback")), means[0]
        lines.append((place, line(row.name, seeds, *(f"{mean:.3f}" for mean in means))))
    return [shown for _, shown in sorted(lines)]


def tracked() -> list[str]:
    """Last answers that are right by length, means over seeds; problem by problem, the best first."""
    asked, runs = planned(target_study("statetracking", "tiny"), Order(Path("out")))
    records, lines = Records(RESULTS / "state_tracking"), []
    for row in asked.rows:
        found = [record for run in runs if (run.model, run.variant) == (row.model, row.variant)
                 and (record := run.record(records))]  # fmt: skip
        problem, _, change = row.change.partition(", ")
        failed = [str(record["seed"]) for record in found if record["failed"]]
        found = [record for record in found if record["measured"]]
        name, order = NAMES[row.model] + (change and f", {change}"), ("parity", "S3", "A5").index(problem)
        if failed:
            lines.append((order, 0.0, line(problem, name, ", ".join(failed), *["-"] * 5, "diverged")))
        if not found:
            continue
        each = zip(*([point["mean"] for point in r["measured"]["states"]["by_length"]] for r in found), strict=True)
        means = [100 * sum(column) / len(column) for column in each]
        learned = [next((f"{at:,}" for at, share in r["trained"]["figures"]["whole"] if share >= 0.99), "-")
                   for r in found]  # fmt: skip
        shown = line(problem, name, ", ".join(str(r["seed"]) for r in found), *(f"{mean:.1f}" for mean in means),
                     "; ".join(learned))  # fmt: skip
        lines.append((order, -sum(means), shown))
    return [shown for *_, shown in sorted(lines)]


OF_DNA = {
    "| model that reads the genome |": read_genomes,
    "| set | model | start |": classified,
}


CONVERTED = {
    "full": "full attention",
    "window": "window 64, 4 sinks",
    "lora": "window, low-rank adapters",
    "liza-lora": "LiZA, low-rank adapters",
}
"""Records of docs/results/conversion -> what the page calls the model."""


LONGER = {
    "full-6144": "full attention",
    "window-6144": "window 64, 4 sinks",
    "lora-96": "window, low-rank adapters",
    "memory-96": "memories",
    "never-96": "the same network, never written in training",
}
"""The same after stage 2 of 96 steps, on twice the text: memories that are added, not mixed in."""


MIXED = {
    "full-6144": "full attention",
    "window-6144": "window 64, 4 sinks",
    "mixed-transfer": "memories, stage 1",
    "mixed-never-transfer": "never written in training, stage 1",
    "mixed-tuned": "memories, stages 1 and 2",
    "mixed-never-tuned": "never written in training, stages 1 and 2",
    "lora-96": "window, low-rank adapters, stage 2",
    "liza-96": "LiZA, low-rank adapters, stage 2",
}
"""Memories that are mixed in head by head, on the same text."""


SECOND = {
    "window-6144": "window 64, 4 sinks",
    **{f"{file}-seed2": name for file, name in MIXED.items() if file.startswith("mixed")},
}
"""The same with another seed: other samples, in another order."""


OTHER = {
    "other-full": "full attention",
    "other-window": "window 64, 4 sinks",
    "other-mixed": "memories, stages 1 and 2",
    "other-never": "never written in training, stages 1 and 2",
}
"""Some of them on a text that no training saw."""


LONG = {file.replace("other", "long"): name for file, name in OTHER.items()}
"""The same in streams of 4,096 tokens."""


WIDE = {
    "full-6144": "full attention",
    "wide-window": "window 128, 4 sinks",
    "wide-transfer": "memories, stage 1",
    "wide-never-transfer": "never written in training, stage 1",
    "wide-tuned": "memories, stages 1 and 2",
    "wide-never-tuned": "never written in training, stages 1 and 2",
}
"""Memories that are mixed in, with a window of 128."""


def of_conversion(files: dict[str, str]) -> dict[str, dict[int, list[list[float]]]]:
    """Scores of SmolLM2-135M -> stream -> [n, sum, sum of squares] of each bucket of positions."""
    found: dict[str, dict[int, list[list[float]]]] = {}
    for file, name in files.items():
        for text in (RESULTS / f"conversion/{file}.jsonl").read_text().splitlines():
            row = json.loads(text)
            never = ", never written" if row["freeze_after"] == 0 else ""
            found.setdefault(name + never, {})[row["start"]] = row["positions"]
    return found


def nats(streams: dict[int, list[list[float]]], buckets: slice) -> dict[int, float]:
    """The mean loss of each stream over buckets of positions: bucket 7 is 65 to 128, 8 to 256, 9 to 512."""
    return {
        start: sum(s for _, s, _ in sums[buckets]) / sum(n for n, *_ in sums[buckets])
        for start, sums in streams.items()
    }


NEAR, BEYOND, FAR = slice(0, 7), slice(7, 10), slice(10, 13)
"""Positions 1 to 64, 65 to 512, and 513 to 4,096."""
WIDE_NEAR, WIDE_BEYOND = slice(0, 8), slice(8, 10)
"""Positions 1 to 128, and 129 to 512."""
EACH = [slice(n, n + 1) for n in range(13)]
"""The buckets one by one."""


def ahead(streams: dict, before: dict, buckets: slice) -> list[float]:
    """By how much each stream's loss over buckets of positions is below the one in ``before``."""
    losses = nats(before, buckets)
    return [losses[start] - loss for start, loss in nats(streams, buckets).items()]


def with_error(gains: list[float]) -> str:
    return f"{sum(gains) / len(gains):.3f} ± {standard_error(gains):.3f}"


def beyond_the_window(
    files: dict[str, str] = CONVERTED, columns: Sequence[slice] = (NEAR, *EACH[7:10]), part: slice = BEYOND
) -> list[str]:
    """Losses by position, and what is gained over the window in ``part``, paired by stream."""
    found, lines = of_conversion(files), []
    (window,) = (streams for name, streams in found.items() if name.endswith("sinks"))
    for name, streams in found.items():
        losses = [sum(nats(streams, buckets).values()) / len(streams) for buckets in columns]
        gains = ahead(streams, window, part)
        lines.append(line(name, *(f"{loss:.3f}" for loss in losses), with_error(gains) if any(gains) else "-"))
    return lines


def needles_of_conversion() -> list[str]:
    """Numbers found, and nats per token of the number, at each length."""
    by_model: dict[str, dict[int, list[dict]]] = {}
    for row in map(json.loads, (RESULTS / "conversion/needles.jsonl").read_text().splitlines()):
        by_model.setdefault(row["model"], {}).setdefault(row["length"], []).append(row)
    lines = []
    for name, lengths in by_model.items():
        found, nats = zip(*(found_and_nats(lengths.get(length, [])) for length in (512, 1024, 2048)), strict=True)
        lines.append(line(name, *found, *nats))
    return lines


def needles_again() -> list[str]:
    """Numbers found, and nats per token of the number, by the length of the document."""
    by_length = needles_by_length("needles-again", "memories")
    return [line(f"{length:,}", *found_and_nats(rows)) for length, rows in sorted(by_length.items())]


def needles_by_answers() -> list[str]:
    """The same after attention transfer, and then after training on answers."""
    found = [needles_by_length("needles-answers", model) for model in ("transfer", "answers")]
    return [
        line(f"{length:,}", *(cell for each in found for cell in found_and_nats(each.get(length, []))))
        for length in sorted({length for each in found for length in each})
    ]


def needles_by_length(file: str, model: str) -> dict[int, list[dict]]:
    by_length: dict[int, list[dict]] = {}
    for row in map(json.loads, (RESULTS / f"conversion/{file}.jsonl").read_text().splitlines()):
        if row["model"] == model:
            by_length.setdefault(row["length"], []).append(row)
    return by_length


def found_and_nats(rows: list[dict]) -> tuple[str, str]:
    if not rows:
        return "-", "-"
    return (f"{sum(row['score'] for row in rows):.0f} of {len(rows)}",
            f"{sum(row['answer_nll'] for row in rows) / len(rows):.2f}")  # fmt: skip


def packaged_sets() -> dict[str, dict]:
    """Results of lm-eval by model."""
    return json.loads((RESULTS / "conversion/commonsense.json").read_text())


def accuracies() -> list[str]:
    """LAMBADA's perplexity and the accuracies of the paper's Table 1, in percent, by model."""
    return [
        line(name, f"{math.exp(sum(found['lambada_nats']) / len(found['lambada_nats'])):.1f}",
             *(f"{100 * share:.0f}" for share in found["accuracies"].values()), f"{100 * found['average']:.1f}")
        for name, found in packaged_sets().items()
    ]  # fmt: skip


def which_layers() -> list[str]:
    record = json.loads((RESULTS / "conversion/layers.json").read_text())["layers_with_full_attention"]
    (_, full), (_, none) = record["all 30"], record["none"]
    return [line(name, f"{far:.3f}", f"{(none - far) / (none - full):.0%}") for name, (_, far) in record.items()]


PAGES = {
    CONVERSION: {
        "| memories mixed in |": partial(beyond_the_window, MIXED),
        "| a second seed |": partial(beyond_the_window, SECOND),
        "| window of 128 |": partial(beyond_the_window, WIDE, (WIDE_NEAR, *EACH[8:10]), WIDE_BEYOND),
        "| another text |": partial(beyond_the_window, OTHER),
        "| streams of 4,096 tokens |": partial(beyond_the_window, LONG, (NEAR, BEYOND, *EACH[10:13]), FAR),
        "| 16 steps of next tokens |": beyond_the_window,
        "| 96 steps of next tokens |": partial(beyond_the_window, LONGER),
        "| layers with full attention |": which_layers,
        "| RULER's needle in noise |": needles_of_conversion,
        "| tokens of the document |": needles_again,
        "| tokens of the text |": needles_by_answers,
        "| packaged sets |": accuracies,
    },
    README: {"| model | perplexity at 512 tokens |": overview},
    PAGE: {
        "| model | seeds | perplexity at 512 tokens |": models_in_short,
        "| model | seeds of needles | needles at 2,048 tokens |": asked_in_short,
        "| LMM without |": ablations_in_short,
    },
    REPRODUCE: {"| | trainings | tokens | FLOPs |": costs},
    TINY: {
        "| model | learning rate | perplexity |": models,
        "| model | 0.002 |": learning_rates,
        "| whole runs of | learning rate |": whole_at_rates,
        "| four times the size | 0.001 |": larger_rates,
        "| with more tokens |": scaled,
        "| LMM | seeds |": ablations,
        "| values' filters start |": filters,
        "| by two optimisers |": optimizers,
        "| sizes of the state |": states_compared,
        "| later idea |": later_ideas,
        "| on recall |": ideas_recalled,
        "| on needles |": ideas_in_noise,
        "| depth of the LMM's memory |": depths,
        "| trained with chunks of |": chunks,
        "| tokens of a sequence |": throughput,
    },
    BASELINES: {
        "| model | parameters | seeds | steps | 2,048 |": found_in_noise,
        "| on equal terms | parameters |": on_equal_terms,
        "| needles at other rates | learning rate |": found_at_rates,
        "| model | seeds | accuracy (%) |": recalled,
        "| recall at other rates |": recalled_at_rates,
    },
    EVALUATION: {
        "| model | seed | task | 4,096 |": stories,
        "| task | 2,048 (20) |": needles_in_text,
        "| model | memory |": needles_with_states,
        "| training | minutes |": stages_of_ruler,
        "| after stage | model |": models_after_stages,
    },
    DNA: OF_DNA,
    FORECASTING: {"| model | seeds | test MSE |": forecasts},
    STATES: {"| problem | model | seeds |": tracked},
}
"""A page's tables: how the head begins, and what gives the lines."""


def table_of(head: str, text: str) -> re.Match[str]:
    return re.search(f"({re.escape(head)}.*\n\\|[-|]*\n)((?:\\|.*\n)*)", text)


@pytest.mark.parametrize(("page", "head"), [(page, head) for page, tables in PAGES.items() for head in tables])
def test_a_table_is_that_of_its_records(page, head):
    lines = PAGES[page][head]()
    table = table_of(head, page.read_text())
    assert lines and table[2].splitlines() == lines
    assert {row.count("|") for row in lines} == {table[1].partition("\n")[0].count("|")}, "a column is missing"


@pytest.mark.parametrize(("page", "most"), [(TINY, 4), (BASELINES, 1)])
def test_hours_of_eight_gpus_are_those_of_the_plans(page, most):
    """The hours that pages give beside a command are an eighth of the plan's in docs/reproduce.md."""
    plans = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[5:7]]
             for row in REPRODUCE.read_text().splitlines() if row.startswith("| `titans reproduce")}  # fmt: skip
    said = re.findall(r"`(titans\s+reproduce\s+\w+\s+--size\s+\w+)`[^`]*?(\d+)\s+to\s+(\d+)\s+hours", page.read_text())
    assert len(said) == most
    for command, *hours in said:
        planned_hours = plans[f"{' '.join(command.split())} --dry-run"]
        assert hours == [f"{int(each.replace(',', '')) / 8:.0f}" for each in planned_hours]


def test_what_models_of_text_are_read_as():
    """The leads and ties that docs/tiny.md names."""
    rows = {row[0].row.model: row for row in found("table1")[2]}

    def behind_by(own: str, other: str, column: int = 0) -> Apart:
        cells = rows[own][column], rows[other][column]
        return apart(*(cell.ours for cell in cells), between(cells[0].column.title))

    for best in ("mac", "lmm"):
        others = [model for model in rows if model not in ("mac", "lmm")]
        assert all(behind_by(model, best).nats > 0 and not behind_by(model, best).tie for model in others)
        assert not behind_by("mamba2", best, 1).tie
    ties = [("lmm", "mac"), ("mamba2", "mag"), ("gated_deltanet", "gated_deltanet_h2"), ("transformer", "swa"),
            ("rmt", "swa"), *combinations(("mamba2", "gated_deltanet", "gated_deltanet_h2", "mal"), 2)]  # fmt: skip
    assert all(behind_by(*pair).tie for pair in ties)
    assert all(behind_by("swa", model).nats > 0.1 and not behind_by("swa", model).tie
               and behind_by("swa", model, 1).tie for model in ("ttt_linear", "ttt_mlp"))  # fmt: skip
    assert all(not behind_by(*pair).tie for pair in (("gated_deltanet_h1", "gated_deltanet"), ("mamba", "mamba2"),
                                                     ("longhorn", "mamba2")))  # fmt: skip


def test_what_seeds_do_is_told():
    """docs/tiny.md: what a seed does to all models, and the variance that its intervals assume."""
    three = [row[0].ours.by_seed for row in found("table1")[2] if len(row[0].ours.by_seed) == 3]
    effects = effects_of({(seed, model): value for model, own in enumerate(three) for seed, value in own.items()})
    of_seeds, (variance, freedom) = effects.rows, effects.variance
    mean, models = fmean(of_seeds.values()), len(three)
    ratio = models * sum((value - mean) ** 2 for value in of_seeds.values()) / 2 / variance
    pooled = [figure for figure in of_text("perplexity") if len(figure.figures) > 1]
    near, far = (math.sqrt(between(column).own[0]) for column in ("perplexity", "to 16K"))
    told = " ".join(TINY.read_text().split())
    assert [len(row[0].ours.by_seed) for row in lowest_first(found("table1")[2])] == [3] * 10 + [2] * 11
    ablated, depth = (
        {variant: len(row[0].ours.by_seed) for variant, row in variants(target).items()}
        for target in ("table5", "figure7")
    )
    assert set(ablated.values()) == {3} and [depth[f"depth-{n}"] for n in (1, 3, 4)] == [3, 3, 2]
    for text in (
        "the first ten models of the table below have three, the others two; each ablation and depths 1 and 3 have "
        "three, depth 4 two",
        f"in the {models} models with three seeds, the mean perplexity of seed 0 is {of_seeds[0] - mean:.1f} above "
        f"that of all seeds, seed 2's {mean - of_seeds[2]:.1f} below (F = {ratio:.1f} with 2 and {freedom} degrees of "
        "freedom)",
        f"pooled over {len(pooled)} models and variants with two or three seeds: a standard deviation of {near:.3f} "
        f"nats at 512 tokens and {far:.3f} over 16,384",
    ):
        assert text in told


def test_what_classes_of_dna_are_read_as():
    """The claims of docs/dna.md, of each seed."""
    found = {
        (record["model"], variant, record["seed"]): 100 * record["measured"]["classes"]["columns"]["test"]["mean"]
        for variant, records in of_dna().items() if variant != "pretrain" for record in records
    }  # fmt: skip

    def gain(better: tuple[str, str], worse: tuple[str, str]) -> list[float]:
        return [found[*better, seed] - found[*worse, seed] for seed in range(3) if (*better, seed) in found]

    for start in ("", "-scratch"):
        writes = gain(("lmm", f"coding{start}"), ("lmm", f"coding{start}-memory-off"))
        assert len(writes) == 3 and all(0.5 < each < 3.5 for each in writes)
        writes = gain(("lmm", f"splice{start}"), ("lmm", f"splice{start}-memory-off"))
        assert len(writes) == 3 and all(26 < each < 37 for each in writes)
        assert min(gain(("lmm", f"splice{start}"), ("mamba2", f"splice{start}"))) > 4
    read = {model: gain((model, "coding"), (model, "coding-scratch")) for model in ("lmm", "transformer", "mamba2")}
    assert 0.9 < min(read["transformer"]) <= max(read["transformer"]) < 4.1 and max(read["mamba2"]) < 0
    assert [each > 1 for each in read["lmm"]] == [True, True, False]
    splice = {model: gain((model, "splice"), (model, "splice-scratch")) for model in ("lmm", "transformer", "mamba2")}
    assert all(0.5 < each < 3.5 for each in splice["lmm"]) and max(splice["transformer"]) < 0
    assert [each < -5 for each in splice["mamba2"]] == [True, True, False]
    assert max(mean for (_, variant, _), mean in found.items() if variant.startswith("coding")) < 85, "words are ahead"


def test_what_states_are_read_as():
    """The claims of docs/statetracking.md, of each seed."""
    kept = [json.loads(path.read_text()) for path in sorted((RESULTS / "state_tracking").glob("*.json"))]
    last: dict[tuple[str, str], list[dict[int, float]]] = {}  # seeds in order
    assert {r["variant"] for r in kept if r["failed"]} == {"parity-c1-half-bare", "parity-c1-one-bare"}
    for r in kept:
        if r["failed"]:
            continue
        by_length = {row["length"]: row["mean"] for row in r["measured"]["states"]["by_length"]}
        last.setdefault((r["model"], r["variant"]), []).append(by_length)
    deep, half = last["lmm", "parity-c1-one"], last["lmm", "parity-c1-half"]
    assert len(deep) == 3 and all(by[128] == 1.0 for by in deep), "two layers learn parity"
    assert sorted(by[512] > 0.99 for by in deep) == [False, True, True] and min(by[256] for by in deep) < 0.65
    assert sorted(by[512] for by in half)[-2:] > [0.5, 0.99] and min(by[32] for by in half) > 0.92
    assert last["lmm", "parity-linear-c1-half"][0][64] < 0.55, "at a bound of 0.5"
    learned = {key for key, seeds in last.items() if key[1].startswith("parity") and seeds[0][64] > 0.99}
    later = ("kda", "parity-negative"), ("gdn2", "parity-negative")
    rates = [(model, f"parity-{change}-{rate}") for rate in ("slow", "fast") for model, change in (
        ("lmm", "c1-one"), ("lmm", "linear-c1-one-still"), ("deltanet", "negative"))]  # fmt: skip
    rules = [("lmm", f"parity-c1-one-{rule}") for rule in ("dgd", "omega-4", "omega-16", "unit")]
    cached = ("lmm", "parity-c1-one-caching")
    assert learned == {
        ("lmm", "parity-c1-one"), ("lmm", "parity-c1-one-still"), ("lmm", "parity-c1-half"),
        ("lmm", "parity-linear-c1-one"), ("lmm", "parity-linear-c1-one-still"), ("deltanet", "parity-negative"),
        ("gated_deltanet", "parity-negative"), ("deltaproduct", "parity"), *later, *rates,
        ("lmm", "parity-linear-c1-one-yaad"), ("lmm", "parity-c1-one-yaad"), *rules,
    }  # fmt: skip
    assert all(by[256] == 1.0 and by[512] > 0.99 for key in rules for by in last[key])
    assert all(0.77 < last[key][0][256] < 0.79 for key in later)
    (huber,) = last["lmm", "parity-linear-c1-one-yaad"]
    assert huber[512] == pytest.approx(0.996, abs=0.0005)
    assert len(last["lmm", "parity-c1-one-yaad"]) == 3
    assert all(set(by.values()) == {1.0} for by in last["lmm", "parity-c1-one-yaad"]), "every sample of every length"
    (rwkv7,) = last["rwkv7", "parity"]
    assert rwkv7[32] == pytest.approx(0.98, abs=0.005) and rwkv7[64] < 0.55
    assert [len(last[key]) for key in rates if key[1].endswith("fast")] == [3, 3, 3]
    for (least, most), key in zip(((0.5, 1.0), (0.51, 0.84), (0.46, 0.84)), rates[3:], strict=True):
        ends = [by[512] for by in last[key]]
        assert min(ends) == pytest.approx(least, abs=0.013) and max(ends) == pytest.approx(most, abs=0.005)
    assert sorted(by[512] > 0.99 for by in last[rates[3]]) == [False, True, True]
    assert last[rates[0]][0][512] == pytest.approx(0.99, abs=0.005)
    assert [last[cached][0][length] for length in (64, 512)] == pytest.approx([0.98, 0.79], abs=0.005)
    assert max(last["lmm", "S3-c1-one-yaad"][0].values()) < 0.2
    attended = {("mac", "parity-c1-one"): 0.75, ("mag", "parity-c1-one"): 0.95}
    for key, most in attended.items():
        assert 0.7 < last[key][0][32] < most and last[key][0][512] < 0.6
    others = {key: seeds for key, seeds in last.items() if key[1].startswith("parity")}
    others = [by[64] for key, seeds in others.items() if key not in {*learned, *attended, cached} for by in seeds]
    assert max(others) < 0.57, "the others are at chance"
    linear, still = (last["lmm", f"parity-linear-c1-one{end}"] for end in ("", "-still"))
    assert sorted(by[128] < 0.55 for by in linear) == [False, True, True] and min(by[128] for by in still) >= 0.98
    assert max(by[512] for by in (*linear, *still)) < 0.55
    for model, most in ("deltanet", (0.98, 0.87)), ("gated_deltanet", (0.87, 0.6)):
        seeds = last[model, "parity-negative"]
        assert len(seeds) == 3 and min(by[128] for by in seeds) > 0.93
        assert max(by[256] for by in seeds) < most[0] and max(by[512] for by in seeds) < most[1]
    assert min(by[256] for by in last["deltanet", "parity-negative"]) > 0.83
    for by in last["deltanet", "S3-negative"]:
        assert by[32] > 0.96 and by[512] < 0.35
    assert [by[32] > 0.95 for by in last["lmm", "S3-linear-c1-one"]] == [True, True, False]
    still = [by[32] for by in last["lmm", "S3-linear-c1-one-still"]]
    assert min(still) == pytest.approx(0.773, abs=0.005) and max(still) == pytest.approx(0.992, abs=0.005)
    pairs = {key: seeds for key, seeds in last.items() if key[1].endswith("pair")}
    reflecting = {
        ("lmm", f"A5-linear-c1-one{change}-pair"): n for change, n in (("", 1), ("-still", 3), ("-still-hard", 1))
    }
    reflecting["deltanet", "A5-negative-pair"] = 2
    assert {key: len(seeds) for key, seeds in pairs.items() if seeds[0][32] == 1.0} == reflecting
    assert all(by[32] == 1.0 and by[64] > 0.98 for key in reflecting for by in pairs[key])
    assert sorted(by[128] > 0.9 for by in pairs["lmm", "A5-linear-c1-one-still-pair"]) == [False, True, True]
    (hard,) = pairs["lmm", "A5-linear-c1-one-still-hard-pair"]
    assert hard[128] == 1.0 and hard[512] == pytest.approx(0.37, abs=0.005)
    assert pairs["transformer", "A5-pair"][0][32] == pytest.approx(0.11, abs=0.005)
    chance = ("mamba2", "A5-pair"), ("deltanet", "A5-pair"), ("lmm", "A5-pair"), ("lmm", "A5-c1-one-pair")
    assert max(by[32] for key in chance for by in pairs[key]) < 0.03
    (twice,) = last["lmm", "S3-linear-c1-one-two"]
    assert twice[32] == 1.0 and twice[64] == pytest.approx(0.98, abs=0.005) and twice[256] < 0.25
    assert 0.3 < last["lmm", "S3-c1-one"][0][32] < 0.37 and last["lmm", "S3-c1-one-still"][0][32] < 0.22
    of_all = [by[32] for key, seeds in last.items() if key[1].startswith("A5") and key not in pairs for by in seeds]
    assert len(of_all) == 4 and max(of_all) < 0.025


def test_what_forecasts_are_read_as():
    """The claims of docs/forecasting.md, of each seed."""
    kept = [json.loads(path.read_text()) for path in sorted((RESULTS / "forecast").glob("*.json"))]
    found = {(r["model"], r["variant"], r["seed"]): r["measured"]["forecast"] for r in kept}

    def mse(model: str, variant: str, seed: int, row: str = "model") -> float:
        return found[model, variant, seed]["rows"][row]["mse"]

    ridge = "ridge on the lookback"
    short, below = "elecdemand-96", set()
    for (model, variant, seed), result in found.items():
        if result["rows"]["model"]["mse"] < result["rows"][ridge]["mse"]:
            below.add((model, variant, seed))
    assert {key[:2] for key in below if "all" not in key[1]} == {("lmm", short), ("lmm", f"{short}-chunk-4")}
    assert all(key in below for key in found if key[1].endswith("all")), "with all windows models are below ridge"
    for seed in (0, 1):
        gain = [mse("lmm", f"{name}-off", seed) / mse("lmm", name, seed) - 1 for name in (short, "generation-96")]
        assert all(0.01 < each < 0.021 for each in gain), "writes are worth one to two percent"
        gain = mse("lmm", f"{short}-l336-off", seed) / mse("lmm", f"{short}-l336", seed) - 1
        assert abs(gain) < 0.01, "and nothing at the longer lookback"
        others = [mse(model, short, seed) for model in ("mac", "mag", "mal", "mamba2", "gated_deltanet", "transformer")]
        assert mse("lmm", short, seed) < min(others)
        assert mse("transformer", "generation-96", seed) < mse("lmm", "generation-96", seed)
        assert mse("lmm", "elecdemand-720", seed) < mse("transformer", "elecdemand-720", seed)
        assert mse("transformer", short, seed) == max(*others, 0.0)
        for model in ("lmm", "transformer"):
            assert mse(model, f"{short}-l336", seed) < 0.9 * mse(model, short, seed), "a longer lookback helps"
        streamed = found["lmm", f"{short}-stream", seed]["streamed"]
        assert streamed["fresh"]["mse"] < streamed["carried"]["mse"], "a carried state does not"
        assert mse("transformer", f"{short}-all", seed) < mse("lmm", f"{short}-all", seed)
        assert mse("lmm", f"{short}-l720", seed) < mse("lmm", f"{short}-l336", seed)
    first = [found[model, short, 0]["steps"] for model in ("lmm", "transformer")]
    assert min(steps["model"][0][0] / steps[ridge][0][0] for steps in first) > 3, "one row ahead"


def test_what_a_conversion_is_read_as():
    """The claims of docs/conversion.md."""
    found, text = of_conversion(CONVERTED), " ".join(CONVERSION.read_text().split())
    plain = found["window 64, 4 sinks"]
    for part in (BEYOND, NEAR):
        assert with_error(ahead(found["window, low-rank adapters"], plain, part)) in text
    worth: dict[str, list[list[float]]] = {}
    for mixed in map(of_conversion, (MIXED, SECOND)):
        for stage in ("stage 1", "stages 1 and 2"):
            memories = mixed[f"memories, {stage}"]
            for without in (mixed[f"never written in training, {stage}"], mixed[f"memories, {stage}, never written"]):
                for part in (BEYOND, NEAR):
                    assert with_error(ahead(memories, without, part)) in text
            control = mixed[f"never written in training, {stage}"]
            worth.setdefault(stage, []).append(ahead(memories, control, BEYOND))
    assert [with_error([sum(pair) / 2 for pair in zip(*gains, strict=True)]) for gains in worth.values()] == [
        "0.040 ± 0.006", "0.085 ± 0.020"]  # fmt: skip
    frozen = of_conversion({"mixed-tuned-seed2-frozen": "frozen"})["frozen"]
    second = of_conversion(SECOND)["memories, stages 1 and 2"]
    assert with_error(ahead(second, frozen, WIDE_BEYOND)) in text and not any(ahead(second, frozen, WIDE_NEAR))
    never = of_conversion(SECOND)["memories, stages 1 and 2, never written"]
    assert f"{with_error(ahead(frozen, never, WIDE_BEYOND))} against never writing" in text
    longer = of_conversion(LONGER)
    memories, control = longer["memories"], longer["the same network, never written in training"]
    for part in (BEYOND, NEAR):
        for without in (control, longer["memories, never written"], longer["window, low-rank adapters"]):
            assert with_error(ahead(memories, without, part)).removeprefix("-") in text
    for files, parts in ((OTHER, (BEYOND, NEAR)), (LONG, (FAR,))):
        elsewhere = of_conversion(files)
        memories, control = (elsewhere[f"{name}, stages 1 and 2"] for name in ("memories", "never written in training"))
        for part in parts:
            assert with_error(ahead(memories, control, part)) in text
    ended = {"mixed-training": 0.47, "mixed-never-training": 0.65, "wide-training": 0.61, "wide-never-training": 0.75,
             "mixed-training-seed2": 0.49, "mixed-never-training-seed2": 0.68}  # fmt: skip
    for record, ends in ended.items():
        *_, (step, loss, _) = json.loads((RESULTS / f"conversion/{record}.json").read_text())["validation"]
        assert step == 300 and loss == pytest.approx(ends, abs=0.005)
    wide = of_conversion(WIDE)
    for stage in ("stage 1", "stages 1 and 2"):
        for part in (WIDE_BEYOND, WIDE_NEAR):
            gains = ahead(wide[f"memories, {stage}"], wide[f"never written in training, {stage}"], part)
            assert with_error(gains) in text
    full, window, memories, control = (found["lambada_nats"] for found in packaged_sets().values())
    for before, after in ((window, full), (window, memories), (window, control), (control, memories)):
        assert with_error([a - b for a, b in zip(before, after, strict=True)]) in text
    means = json.loads((RESULTS / "conversion/reads.json").read_text())["mean"]
    assert [round(share, 2) for share in means.values()] == [0.29, 0.28, 0.31, 0.43, 0.47]
    assert f"{with_error(ahead(plain, found['LiZA, low-rank adapters'], BEYOND))} nats above" in text
    mixed = of_conversion(MIXED)
    liza, plain = mixed["LiZA, low-rank adapters, stage 2"], mixed["window 64, 4 sinks"]
    for part in (BEYOND, NEAR):
        assert with_error(ahead(plain, liza, part)) in text


if __name__ == "__main__":
    for page, tables in PAGES.items():
        written = page.read_text()
        for each, of_records in tables.items():
            old = table_of(each, written)
            written = "\n".join([written[: old.end(1) - 1], *of_records(), written[old.end(2) :]])
        page.write_text(written)
    DRAWN.write_text(json.dumps({name: draw(name) for name in PICTURES}, indent=1) + "\n")
