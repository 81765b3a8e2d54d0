"""Time kernel launches that configurations.KERNELS does not have: python -m titans_pt.benchmarks.tuning FOLDER

One kernel at a time gets other warps and slices of the hidden layer; all else stays. Times are for forward + backward
at 32K tokens, T = 4K. Errors compare all gradients with those of the usual launch, in bf16. Writes tuning.md and
tuning.csv to FOLDER. Nothing is changed: a launch is pinned in the code once a measurement supports it.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.benchmarks.kernels import WIDTH, inputs, memory_call, milliseconds
from titans_pt.benchmarks.process import check_any, named, write_csv
from titans_pt.kernels.memory.fused.configurations import KERNELS, Configuration
from titans_pt.tools.files import write_text
from titans_pt.tools.markdown import markdown_table

SHAPES = ((4, 16), (4, 64), (2, 64))
"""(expansion, chunk size) of the memories."""
TOKENS, LENGTH = 32_768, 4096
WARPS, SLICES = (4, 8), (16, 32, 64)
ROUNDS = 5


@dataclass
class Launch:
    """One launch and its figures.

    kernel: the kernel that differs; "": none. milliseconds: forward and backward of the whole call. ratio: its
    milliseconds divided by the usual launch's. error: largest relative error of a gradient. note: reason why there are
    no figures.
    """

    expansion: int
    chunk: int
    kernel: str = ""
    slice: int = 0
    warps: int = 0
    milliseconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    note: str = ""


def launches(expansion: int, chunk: int) -> Iterator[Launch]:
    """Yield the usual launch, then all launches in which one kernel differs."""
    yield Launch(expansion, chunk)
    for kernel, by_width in KERNELS.items():
        usual = by_width[WIDTH]
        if kernel == "step":  # the kernel for single tokens
            continue
        for width, warps in product(SLICES if usual.slice else (0,), WARPS):
            if Configuration(width, warps) != usual:
                yield Launch(expansion, chunk, kernel, width, warps)


@contextmanager
def launched(launch: Launch) -> Iterator[None]:
    """Context in which kernels are launched as ``launch`` says."""
    if not launch.kernel:
        yield
        return
    usual = KERNELS[launch.kernel][WIDTH]
    KERNELS[launch.kernel][WIDTH] = Configuration(launch.slice, launch.warps)
    try:
        yield
    finally:
        KERNELS[launch.kernel][WIDTH] = usual


def measured(launch: Launch, tokens: int, length: int, rounds: int) -> tuple[float, list[Tensor]]:
    """Median milliseconds of ``rounds`` calls after one that compiles and a first one, and the gradients."""
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    x = inputs(tokens // length, length, launch.expansion, "cuda" if cuda else "cpu", dtype)
    with launched(launch):
        call = memory_call("triton", x, launch.chunk)

        def both() -> list[Tensor]:
            return list(torch.autograd.grad(call().square().sum(), list(x.values())))

        found = both()
        return milliseconds(both, "cuda", rounds) if cuda and rounds else 0.0, found


def compiles(launch: Launch, tokens: int, length: int) -> str:
    """Fill Triton's cache, in a separate process; return the reason of a failure, or ""."""
    try:
        measured(launch, tokens, length, 0)
    except Exception as error:  # noqa: BLE001 - any error becomes the note of its row; the other rows are still measured
        return named(error)
    return ""


def tune(out: Path, jobs: int) -> list[Launch]:
    """Time all launches of all SHAPES; ``jobs`` processes compile at a time."""
    rows = [launch for shape in SHAPES for launch in launches(*shape)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        count = len(rows)
        for row, note in zip(rows, pool.map(compiles, rows, [TOKENS] * count, [LENGTH] * count), strict=True):
            row.note = note
    usual: dict[tuple[int, int], tuple[float, list[Tensor]]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.note:
            continue
        try:
            row.milliseconds, found = measured(row, TOKENS, LENGTH, ROUNDS)
        except Exception as error:  # noqa: BLE001 - as above; what was measured before stays
            row.note = named(error)
            continue
        base, theirs = usual.setdefault((row.expansion, row.chunk), (row.milliseconds, found))
        row.ratio = row.milliseconds / base if base else None
        errors = ((a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, theirs, strict=True))
        row.error = max(float(error) for error in errors)
        write_csv(out / "tuning.csv", rows)  # after every row: a time limit may cut the next one
    write_csv(out / "tuning.csv", rows)
    write_text(out / "tuning.md", f"{table(rows)}\n")
    print(table(rows))
    check_any([row.note for row in rows])
    return rows


def table(rows: list[Launch]) -> str:
    """A Markdown table, the fastest of each shape first."""
    found = []
    for row in sorted(rows, key=lambda row: (row.expansion, row.chunk, bool(row.note), row.milliseconds or 0.0)):
        figures = ["-" if x is None else f"{x:.3g}" for x in (row.milliseconds, row.ratio, row.error)]
        launch = (row.expansion * WIDTH, row.chunk, row.kernel or "as usual", row.slice or "-", row.warps or "-")
        found.append((*launch, *figures, row.note))
    heads = ("hidden", "C", "kernel", "slice", "warps", "ms", "to the usual", "error", "note")
    return markdown_table(heads, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=12)
    options = parser.parse_args()
    tune(options.out, options.jobs)
