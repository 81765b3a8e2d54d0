"""docs/results.md says what the records say."""

import re
from pathlib import Path

from titans_pt.reproduce.records import Records
from titans_pt.reproduce.reproduce import planned
from titans_pt.reproduce.studies import Order
from titans_pt.reproduce.tables import Cell, cells, number

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/results.md").read_text()
FOLDER = ROOT / "docs/results/records"
NAMES = {
    "transformer": "Transformer++", "swa": "sliding window", "ttt_linear": "TTT-Linear", "ttt_mlp": "TTT-MLP",
    "gated_deltanet": "Gated DeltaNet", "gated_deltanet_h1": "Gated DeltaNet-H1",
    "gated_deltanet_h2": "Gated DeltaNet-H2", "deltanet": "DeltaNet", "retnet": "RetNet",
    "linear_attention": "linear attention",
} | {name: name.upper() for name in ("lmm", "mac", "mag", "mal", "gla", "hgrn2", "rmt")}  # fmt: skip


def told(cell: Cell) -> str:
    """Perplexity, and its interval."""
    if cell.ours is None:
        return cell.why
    low, high = cell.ours.interval
    return f"{number(cell.ours.mean)} ({number(low)} to {number(high)})"


def lines(target: str) -> list[str]:
    """The table of what has been run, the lowest perplexity first: the learning rate, and every figure."""
    study, runs = planned(target, "tiny", Order(Path("out")))
    records, rates = Records(FOLDER), {run.model: run for run in runs if not run.is_probe}
    found = cells(study, runs, records)
    rows = [[cell for cell in found if cell.row == row] for row in study.rows]
    text = []
    for of_row in sorted((r for r in rows if r[0].ours), key=lambda r: r[0].ours.mean):
        row = of_row[0].row
        rate = f"{rates[row.model].settled(records).train.lr:.0e}".replace("e-0", "e-")
        text.append(f"| {NAMES.get(row.model, row.name.capitalize())} | {rate} | {' | '.join(map(told, of_row))} |")
    return text


def test_the_table_of_the_tiny_study_is_that_of_its_records():
    said = re.search(r"\| model \| learning rate \| perplexity .*\n\|[-|]*\n((?:\|.*\n)+)", PAGE)[1].splitlines()
    assert said == lines("table1")
