from pathlib import Path

import click

from titans_pt.commands._arguments import FILE, NAMES, PATH, Checked, whole

SECTION = "evaluate"
WRITES = "--out"


def _range(word: str) -> tuple[int, int]:
    least, most = (whole(1).read(part) for part in word.split(","))
    return least, most


@click.command()
@click.option("--out", type=FILE, required=True, metavar="FILE", help="the JSONL file to write, one line per document")
@click.option(
    "--tasks", type=NAMES, default="niah_single_1,niah_single_2", metavar="NAMES",
    help="tasks in turn: niah_single_1 (noise), niah_single_2 (text), niah_single_3 (uuids), niah_multikey_1 (4 keys)",
)  # fmt: skip
@click.option("--documents", "count", type=whole(1), default=20_000, metavar="N", help="number of documents")
@click.option(
    "--words", type=Checked(_range, "two whole numbers of at least 1 with a comma between"), default="20,1000",
    metavar="LEAST,MOST", help="words of a haystack, log-uniform",
)  # fmt: skip
@click.option(
    "--texts", type=PATH, metavar="DIR", help=".txt files to hide needles in (default: the documentation of Python)"
)
@click.option("--seed", type=whole(0), default=0, metavar="N", help="random seed of the documents")
def ruler(out: Path, tasks: list[str], count: int, words: tuple[int, int], texts: str | None, seed: int):
    """Write RULER's needles as documents to train on."""
    from titans_pt.evaluation.ruler_documents import write_documents

    write_documents(out, tasks, count, words, texts, seed)
