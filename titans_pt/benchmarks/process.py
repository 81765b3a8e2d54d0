"""Setup of the benchmarks' process, and output of their rows."""

import csv
import io
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from titans_pt.errors import UserError
from titans_pt.runs.folder import versions
from titans_pt.tools.files import write_text


def memory_mib(field: str) -> float:
    """Memory of the process in MiB as Linux reports it. VmRSS: resident now; VmHWM: the peak so far.

    (getrusage's ru_maxrss would start at the parent's peak.)
    """
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024


def peak_mib(device: torch.device) -> float:
    """Peak memory in MiB so far: allocations on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return memory_mib("VmHWM")


def named(error: Exception) -> str:
    """An error in one short line, for a benchmark's row without figures."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def check_any(failures: list[str]):
    """
    Args:
        failures: reason why each row of a benchmark has no figures; empty for a row with figures.

    Raises:
        UserError: no row has figures.
    """
    if all(failures):
        raise UserError(f"nothing was measured: all {len(failures)} rows failed; the first: {failures[0]}")


def write_about(path: Path, **more: Any):
    """Write versions, hardware, threads and ``more`` as JSON."""
    write_text(path, json.dumps(versions() | more | {"threads": torch.get_num_threads()}, indent=1) + "\n")


def write_csv(path: Path, rows: list[Any]):
    """Write ``rows``, dataclasses of one kind, as lines of CSV under their fields' names."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(rows[0])])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(path, text.getvalue())
