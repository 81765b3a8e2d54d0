"""docs/results.md says what the records say."""

import re
from pathlib import Path

from titans_pt.experiments import needles, recall
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.reproduce import planned
from titans_pt.reproduce.studies import Order
from titans_pt.reproduce.tables import Cell, behind, cells, number
from titans_pt.tools.records import read_records

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
NAMES = {
    "transformer": "Transformer++", "swa": "sliding window", "ttt_linear": "TTT-Linear", "ttt_mlp": "TTT-MLP",
    "gated_deltanet": "Gated DeltaNet", "gated_deltanet_h1": "Gated DeltaNet-H1",
    "gated_deltanet_h2": "Gated DeltaNet-H2", "deltanet": "DeltaNet", "retnet": "RetNet",
    "linear_attention": "linear attention", "attention": "Transformer++", "mamba+swa": "Samba",
    "gated_deltanet+swa": "Gated DeltaNet-H1", "mamba2+gated_deltanet+swa": "Gated DeltaNet-H2",
} | {name: name.upper() for name in ("lmm", "mac", "mag", "mal", "gla", "hgrn2", "rmt")}  # fmt: skip


def named(model: str) -> str:
    return NAMES.get(model, model.capitalize())


def table_of(head: str) -> list[str]:
    """The lines of the table of docs/results.md whose head begins so."""
    table = re.escape(head) + r".*\n\|[-|]*\n((?:\|.*\n)+)"
    return re.search(table, (ROOT / "docs/results.md").read_text())[1].splitlines()


def told(cell: Cell) -> str:
    return number(cell.ours.mean) if cell.ours else cell.why


def seeds(cell: Cell) -> str:
    """Each seed's own figure, where there are several."""
    by_seed = cell.ours.by_seed
    return ", ".join(number(by_seed[seed]) for seed in sorted(by_seed)) if len(by_seed) > 1 else "-"


def lines(target: str) -> list[str]:
    """The table of what has been run, the lowest perplexity first: the learning rate, the mean over seeds, each seed,
    how far behind the best on the same text, and the other figures."""
    study, runs = planned(target, "tiny", Order(Path("out")))
    records, rates = Records(RESULTS / "records"), {run.model: run for run in runs if not run.is_probe}
    found = cells(study, runs, records)
    apart = {row[0]: row[1] for row in behind(study, found).rows}
    rows = [[cell for cell in found if cell.row == row] for row in study.rows]
    text = []
    for first, *others in sorted((r for r in rows if r[0].ours), key=lambda r: r[0].ours.mean):
        row = first.row
        rate = f"{rates[row.model].settled(records).train.lr:.0e}".replace("e-0", "e-")
        shown = [named(row.model), rate, told(first), seeds(first), apart.get(row.name, "-"), *map(told, others)]
        text.append(f"| {' | '.join(shown)} |")
    return text


def renamed(text: str) -> list[str]:
    """A table's lines with the models' names."""
    return [
        f"| {named(line.split(' | ')[0][2:].lower())} | {line.partition(' | ')[2]}" for line in text.splitlines()[2:]
    ]


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


def test_the_table_of_the_tiny_study_is_that_of_its_records():
    assert table_of("| model | learning rate | perplexity |") == lines("table1")


def test_the_table_of_recall_is_that_of_its_records():
    assert table_of("| model | seeds | accuracy (%) |") == recalled()


def test_the_table_of_needles_is_that_of_its_records():
    assert table_of("| model | parameters | seeds | 2,048 | 16,384 |") == found_in_noise()
