"""docs/results.md says what the records say. ``python -m tests.test_results`` writes its tables anew."""

import math
import re
from pathlib import Path

import pytest

from titans_pt.experiments import needles, recall
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.reproduce import plan, planned
from titans_pt.reproduce.runs import Run
from titans_pt.reproduce.studies import CHANGES, NAMES, Order, Study
from titans_pt.reproduce.tables import Cell, behind, cells, number
from titans_pt.tools.records import read_records

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
PAGE = ROOT / "docs/results.md"
MIXERS = {
    "attention": "transformer", "mamba+swa": "samba", "gated_deltanet+swa": "gated_deltanet_h1",
    "mamba2+gated_deltanet+swa": "gated_deltanet_h2",
}  # fmt: skip
"""Mixers of models that have another name than these."""


def told(cell: Cell) -> str:
    return number(cell.ours.mean) if cell.ours else cell.why


def seeds(cell: Cell) -> str:
    """Each seed's own figure, where there are several."""
    by_seed = cell.ours.by_seed
    return ", ".join(number(by_seed[seed]) for seed in sorted(by_seed)) if len(by_seed) > 1 else "-"


def found(target: str) -> tuple[Study, list[Run], list[list[Cell]]]:
    """A study, its runs, and the cells of every row of which something was run."""
    study, runs = planned(target, "tiny", Order(Path("out")))
    each = cells(study, runs, Records(RESULTS / "records"))
    rows = [[cell for cell in each if cell.row == row] for row in study.rows]
    return study, runs, [row for row in rows if row[0].ours]


def line(*shown: str) -> str:
    return f"| {' | '.join(shown)} |"


def lowest_first(rows: list[list[Cell]]) -> list[list[Cell]]:
    return sorted(rows, key=lambda row: row[0].ours.mean)


def models() -> list[str]:
    """The learning rate, the mean over seeds, each seed, how far behind the best on the same text, and the others."""
    study, runs, rows = found("table1")
    records, rates = Records(RESULTS / "records"), {run.model: run for run in runs if not run.is_probe}
    apart = {name: by for name, by, *_ in behind(study, [cell for row in rows for cell in row]).rows}
    text = []
    for first, *others in lowest_first(rows):
        row = first.row
        rate = f"{rates[row.model].settled(records).train.lr:.0e}".replace("e-0", "e-")
        text.append(
            line(row.name, rate, told(first), seeds(first), apart.get(row.name, "-"), *map(told, others))
        )
    return text


def variants(target: str) -> dict[str, list[Cell]]:
    """The cells of an LMM and of its variants, all of seed 0."""
    return {row[0].row.variant: row for row in found(target)[2] if row[0].row.model == "lmm"}


def ablations() -> list[str]:
    """What each change costs, in nats and in those of the paper, and the other figures; the costliest last."""
    rows = sorted(variants("table5").items(), key=lambda item: item[1][0].ours.mean)
    whole = dict(rows)[""][0]
    return [
        line(
            CHANGES.get(variant, "LMM"), told(first), f"{math.log(first.ours.mean / whole.ours.mean):+.3f}",
            f"{math.log(first.paper / whole.paper):+.3f}", *map(told, others),
        )
        for variant, (first, *others) in rows
    ]  # fmt: skip


def depths() -> list[str]:
    """Perplexity by the length of the text, one depth a line."""
    return [line(variant[-1:] or "2", *map(told, row)) for variant, row in variants("figure7").items()]


def chunks() -> list[str]:
    """Perplexity by the chunk of evaluation, one chunk of training a line."""
    return [line(variant[len("chunk-") :] or "16", *map(told, row)) for variant, row in variants("chunks").items()]


def throughput() -> list[str]:
    """The fastest at the shortest length first."""
    rows = found("figure9")[2] + [row for row in found("figure8")[2] if row[0].row.variant]
    return [line(row[0].row.name, *map(told, row)) for row in reversed(lowest_first(rows))]


def renamed(text: str) -> list[str]:
    """A table's lines with the models' names."""
    lines = [line.removeprefix("| ").partition(" | ") for line in text.splitlines()[2:]]
    return [f"| {NAMES[MIXERS.get(mixers.lower(), mixers.lower())]} | {rest}" for mixers, _, rest in lines]


def recalled() -> list[str]:
    """A line for each model, the most accurate first."""
    models = {}
    for record in recall.finished(RESULTS / "recall"):
        models.setdefault(record["model"], []).append(record)
    seeds = [sorted(each, key=lambda r: r["seed"]) for each in models.values()]
    return renamed(recall.table(sorted(seeds, key=lambda each: -sum(r["accuracy"] for r in each) / len(each))))


def found_in_noise() -> list[str]:
    """A line for each model, the most needles at the longest length of all first."""
    rows = []
    for path in (RESULTS / "needles").glob("*.jsonl"):
        records = read_records([path]).values()
        trained = {record["sha256"]: record for record in records if record["kind"] == "trained"}
        rows += [trained[record["sha256"]] | record for record in records if record["kind"] == "asked"]
    lines = needles.by_model(rows)
    everywhere = max(set.intersection(*({row["length"] for row in line["by_length"]} for line in lines)))
    return renamed(needles.table(sorted(
        lines, key=lambda line: -next(row["mean"] for row in line["by_length"] if row["length"] == everywhere)
    )))  # fmt: skip


FULL_SIZE = ("table1 340m", "table1 760m", "table2 340m", "table5 400m", "figure7 340m", "chunks 340m", "babilong 340m")


def costs() -> list[str]:
    """What studies of full size take, from the last line of their plans."""
    lines = []
    for target, size in map(str.split, FULL_SIZE):
        _, runs = planned(target, size, Order(Path("out")))
        _, _, *total, _ = plan(runs, Records(Path("none"))).rows[-1]
        lines.append(line(f"`titans reproduce {target} --size {size} --dry-run`", f"{len(runs)}", *total))
    return lines


TABLES = {
    "| | trainings | tokens | FLOPs |": costs,
    "| model | learning rate | perplexity |": models,
    "| LMM of seed 0 |": ablations,
    "| depth of the LMM's memory |": depths,
    "| trained with chunks of |": chunks,
    "| tokens of a sequence |": throughput,
    "| model | seeds | accuracy (%) |": recalled,
    "| model | parameters | seeds | 2,048 | 16,384 |": found_in_noise,
}
"""How a table's head begins, and what gives its lines."""


def table_of(head: str, text: str) -> re.Match[str]:
    return re.search(f"({re.escape(head)}.*\n\\|[-|]*\n)((?:\\|.*\n)+)", text)


@pytest.mark.parametrize("head", TABLES)
def test_a_table_is_that_of_its_records(head):
    assert table_of(head, PAGE.read_text())[2].splitlines() == TABLES[head]()


if __name__ == "__main__":
    written = PAGE.read_text()
    for each, of_records in TABLES.items():
        old = table_of(each, written)
        written = "\n".join([written[: old.end(1) - 1], *of_records(), written[old.end(2) :]])
    PAGE.write_text(written)
