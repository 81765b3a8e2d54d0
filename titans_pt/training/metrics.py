"""What a run reports while it trains: metrics, one JSON object per line, and a progress bar."""

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from titans_pt.tools.files import write_text

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s of known GPUs (SXM), by a part of their name."""


class MetricsLog:
    """metrics.jsonl: one object per record, each with ``kind`` and ``step``.

    kind "train": a logged step. "validation": validation_loss. "nonfinite": a skipped step and its samples.
    "evaluation": figures of summary.json, by their paths in it.
    """

    def __init__(self, path: Path, resumed_step: int):
        """Opens the file to append; records after ``resumed_step`` are removed, since those steps are repeated."""
        keep = [record for record in read_metrics(path) if record["step"] <= resumed_step]
        write_text(path, "".join(_line(record) for record in keep))
        self.path, self._file = path, path.open("a")

    def write(self, kind: str, step: int, **values: Any):
        """
        Raises:
            OSError: the disk is full, for example; it names the file.
        """
        try:
            self._file.write(_line({"kind": kind, "step": step, **values}))
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # a failed write does not say where

    def close(self):
        with contextlib.suppress(OSError):  # a line that could not be written is tried again here
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a crash cut short is left out. No file: none."""
    records = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records


def _line(record: dict[str, Any]) -> str:
    """One line of strict JSON, which has no NaN: non-finite numbers become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


class Progress:
    """A progress bar on stderr with loss, tokens per second and the time left; none if ``shown`` is False."""

    def __init__(self, step: int, last: int, shown: bool):
        self._bar = tqdm(
            total=last, initial=step, unit="step", dynamic_ncols=True, disable=not shown,
            mininterval=0.5 if sys.stderr.isatty() else 15.0,  # a log file wants few lines
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} steps [{elapsed}, {remaining} left{postfix}]",
        )  # fmt: skip

    def update(self, loss: float, tokens_per_second: float):
        self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def close(self):
        self._bar.close()


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, or None where it is not known (CPUs, other GPUs)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
