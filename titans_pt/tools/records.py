"""Results as append-only JSONL files: records are never rewritten, and a rerun continues after them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from titans_pt.errors import Busy, UserError
from titans_pt.tools.files import naming
from titans_pt.tools.locks import take
from titans_pt.tools.sealed import seal, unseal


def digest(*parts: Any) -> str:
    """SHA-256 (hex) of plain values. A float and an equal integer have different digests: convert them before."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


def read_records(paths: list[Path]) -> dict[str, dict]:
    """Reads records of several JSONL files by their ``key``; the first record of each key counts.

    A last line without a newline is skipped: its writer was killed, or is still writing it.

    Raises:
        UserError: a complete line is not a record.
    """
    records: dict[str, dict] = {}
    for path in paths:
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                record = unseal(line)
                records.setdefault(record["key"], record)
            except (ValueError, KeyError, TypeError) as error:
                why = f" ({error})" if isinstance(error, ValueError) else ""
                raise UserError(f"{path}: line {number} is not a record{why}; delete the line and run again") from None
    return records


class RecordFile:
    """A JSONL file with a single writer. Opening it removes an unfinished last line that a killed writer left.

    Raises:
        Busy: another process has the file open.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        if not take(self._file.fileno(), path, "a second evaluation there would not be noticed"):
            self._file.close()
            raise Busy(
                f"{path}: another evaluation writes it; wait for it to end, give --out DIR, or start one evaluation "
                "of several processes with torchrun"
            )
        with naming(path):
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, record: dict) -> None:
        """Writes one line with a checksum. The line is flushed to the system: killing this process cannot lose it."""
        with naming(self.path):
            self._file.write(json.dumps(seal(record)).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *_: object) -> None:
        with naming(self.path):
            self._file.close()  # tries again to write a line that failed
