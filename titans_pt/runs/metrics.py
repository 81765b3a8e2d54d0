"""metrics.jsonl of a run: one JSON object per record of its training."""

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

from titans_pt.tools.files import copy_file, naming, unused, write_text
from titans_pt.tools.sealed import seal, unseal

log = logging.getLogger(__name__)
_FIGURES = {"train": ("loss",), "validation": ("validation_loss",)}
"""Entries that a record of each kind must have, because other code reads them."""


class MetricsLog:
    """metrics.jsonl: one object per record, each with ``kind``, ``step`` and a checksum (titans_pt.tools.sealed).

    kind "train": a logged step. "validation": validation_loss. "nonfinite": a skipped step and its samples.
    "evaluation": figures of summary.json, keyed by their paths in that file.
    """

    def __init__(self, path: Path, resumed_step: int, branch: bool = False):
        """Opens the file to append; records after ``resumed_step`` are removed, since those steps are repeated.

        Before a ``branch`` the file is copied under another name, for comparison with the abandoned curve. A file with
        unreadable lines is copied likewise.
        """
        if branch and path.is_file():
            copy = unused(path.with_name(f"{path.stem}.before-{resumed_step}{path.suffix}"))
            copy_file(path, copy)
            log.info("the curves so far are kept as %s", copy)
        records, damaged = _read(path)
        if damaged:
            copy = unused(path.with_name(f"{path.stem}.damaged{path.suffix}"))
            copy_file(path, copy)
            log.warning("%s: line %s cannot be read and is missing from the curves (%d such lines); the file as it "
                        "was is kept as %s", path, damaged[0], len(damaged), copy)  # fmt: skip
        keep = [record for record in records if record["step"] <= resumed_step]
        write_text(path, "".join(_line(record) for record in keep))
        self.path, self._file = path, path.open("a")

    def write(self, kind: str, step: int, **values: Any):
        """Appends a record.

        Raises:
            OSError: the disk is full, for example; the error names the file.
        """
        with naming(self.path):
            self._file.write(_line({"kind": kind, "step": step, **values}))
            self._file.flush()

    def close(self):
        with contextlib.suppress(OSError):  # closing tries again to write a line that failed
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file without unreadable lines; an empty list if there is no file."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """(records, numbers of damaged lines); a last line that a crash cut short is ignored."""
    records, damaged = [], []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = unseal(line)
            if not isinstance(record["step"], int):
                raise ValueError("a step that is no number")
            for key in _FIGURES.get(record["kind"], ()):
                record[key]
            records.append(record)
        except (ValueError, LookupError, TypeError):
            if number < len(lines) or line.strip() and not line.startswith(b'{"'):
                damaged.append(number)
    return records, damaged


def _line(record: dict[str, Any]) -> str:
    """One line of strict JSON, which has no NaN: non-finite numbers become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(seal(finite)) + "\n"
