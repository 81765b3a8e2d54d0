"""A corpus of real text from Debian's packages, laid out like FineWeb-Edu: 82 million tokens, not kept in this folder.

    python tests/data_pipeline/real_text.py FOLDER      (downloads 86 MB through apt-get; needs Debian 12)

The production call then reads it in FOLDER: kind=hub path=HuggingFaceFW/fineweb-edu name=sample-10BT.
"""

import gzip
import html
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

PACKAGES = {
    "linux-doc-6.1": "6.1.176-1", "dict-gcide": "0.48.5+nmu2", "python3.11-doc": "3.11.2-6+deb12u8",
    "anarchism": "15.3-3", "perl-doc": "5.36.0-7+deb12u3", "wordnet-base": "1:3.0-37",
}  # fmt: skip
"""Packages and their versions in Debian 12.15: measurements are comparable over time only with the same text."""
SUFFIXES = (".txt", ".rst", ".html", ".pod", ".md", ".dict", ".adj", ".adv", ".noun", ".verb")
PARAGRAPHS = 4000
"""Least characters of a document cut out of a file of many entries."""
README = """---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def fineweb_row(text: str, identity: str, number: int) -> dict:
    """A row with the columns of FineWeb-Edu; its scores are made up."""
    score = 2.5 + number % 5 / 2
    return {
        "text": text,
        "id": f"<urn:debian:{identity}>",
        "dump": "debian",
        "url": "",
        "file_path": identity,
        "language": "en",
        "language_score": 0.6 + number % 40 / 100,
        "token_count": len(text) // 4,
        "score": score,
        "int_score": round(score),
    }


def write_layout(root: Path, rows: Iterator[dict], rows_a_file: int, row_group: int = 1000) -> Path:
    """Write HuggingFaceFW/fineweb-edu with a sample-10BT of these rows under ``root``."""
    home = root / "HuggingFaceFW" / "fineweb-edu"
    (home / "sample" / "10BT").mkdir(parents=True)
    (home / "README.md").write_text(README)
    waiting, number = [], 0
    for row in rows:
        waiting.append(row)
        if len(waiting) == rows_a_file:
            _write(home, waiting, number, row_group)
            waiting, number = [], number + 1
    if waiting:
        _write(home, waiting, number, row_group)
    return home


def _write(home: Path, rows: list[dict], number: int, row_group: int) -> None:
    path = home / "sample" / "10BT" / f"{number:03d}_00000.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group)


def debian_rows(folder: Path) -> Iterator[dict]:
    """Download and unpack the packages under ``folder`` and yield their text."""
    for package, version in PACKAGES.items():
        subprocess.run(["apt-get", "download", "-q", f"{package}={version}"], cwd=folder, check=True)
        [archive] = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive, folder / package], check=True)
    number = 0
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*")):
            name = path.name.removesuffix(".gz").removesuffix(".dz")
            if path.is_symlink() or not path.is_file() or not name.endswith((*SUFFIXES, ".dict")):
                continue
            data = path.read_bytes() if name == path.name else gzip.decompress(path.read_bytes())
            text = data.decode(errors="replace")
            if name.endswith(".html"):
                text = html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", " ", text)))
                text = re.sub(r"[ \t]*\n\s*\n\s*", "\n\n", text)
            for i, document in enumerate(_documents(text)):
                yield fineweb_row(document, f"{path.relative_to(folder)}#{i}", number)
                number += 1


def _documents(text: str) -> Iterator[str]:
    """Yield a file as one document, but a dictionary in pieces of several entries each."""
    if len(text) < 1_000_000:
        yield text
        return
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PARAGRAPHS and not line.startswith(" "):
            yield piece
            piece = ""
    yield piece


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (root / "debian").mkdir(parents=True)
    rows = list(debian_rows(root / "debian"))
    random.Random(0).shuffle(rows)  # like FineWeb-Edu, where any part is a sample of the whole
    write_layout(root, iter(rows), rows_a_file=4000)
