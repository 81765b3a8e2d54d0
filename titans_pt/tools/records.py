"""Results as append-only JSONL: what is written stays, and a rerun continues after it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from titans_pt.errors import UserError
from titans_pt.tools.sealed import seal, unseal


def digest(*parts: Any) -> str:
    """SHA-256 (hex) of plain values. Floats and integers of one value differ: convert before."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


def read_records(paths: list[Path]) -> dict[str, dict]:
    """The records of several JSONL files by their ``key``; of two with one key the first counts.

    A last line without its newline is skipped: a writer was killed within it, or is writing it now.

    Raises:
        UserError: a whole line is not a record.
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
    """A JSONL file of one writer. Opening it cuts off a line that a killed writer left unfinished."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, record: dict) -> None:
        """Writes one line, with a checksum. The operating system has it then: a kill of this process cannot lose it."""
        try:
            self._file.write(json.dumps(seal(record)).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)  # a full disk's error names none
            raise

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
