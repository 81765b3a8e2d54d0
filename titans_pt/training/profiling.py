"""Time of a training step: a torch.profiler trace in the run folder, and shares by kind of work."""

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from titans_pt.errors import UserError

log = logging.getLogger(__name__)

# fmt: off
KINDS = (
    ("exchange", r"nccl|all_?reduce|all_?gather|reduce_?scatter|gloo|c10d"),
    ("memory", r"^(scan|read|coefficients|chunk)(_backward|_gradients)?$|^step$|titans(_\w+)?::|MemoryScan|NativeScan"),
    ("attention", r"flash|fmha|scaled_dot_product|attention"),
    ("optimizer", r"multi_tensor_apply|adam|foreach"),
    ("matrix product", r"gemm|nvjet|cutlass|::(bmm|mm|addmm|baddbmm)"),
    ("copy", r"memcpy|memset|::copy_|::_to_copy|CatArray|::cat$"),
    ("normalisation, softmax", r"norm|softmax|cross_entropy|nll_loss"),
    ("element-wise", r"elementwise|reduce_kernel|^triton_(poi|red|per)_|"
                     r"::(mul|add|sub|div|sum|exp|silu|sigmoid|gelu|where|cumprod)"),
)
# fmt: on
"""(kind, pattern found in the names of its GPU kernels or CPU operators); the first match counts."""


def kind_of(name: str) -> str:
    """The kind of work that a kernel or operator does; "other" if no pattern of KINDS matches."""
    return next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), "other")


def time_shares(profiler: profile) -> dict[str, float]:
    """Kind of work -> share of the GPU's (else the CPU's) busy time, largest first; the shares sum to 1."""
    events = profiler.key_averages()
    on_gpu = any(event.self_device_time_total > 0 for event in events)
    totals: dict[str, float] = {}
    for event in events:
        # On a GPU count kernels only: operators, and ranges around them, would count the same time twice.
        if on_gpu and (event.device_type == torch.autograd.DeviceType.CPU or event.is_user_annotation):
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        totals[kind_of(event.key)] = totals.get(kind_of(event.key), 0.0) + spent
    whole = sum(totals.values())
    return {kind: spent / whole for kind, spent in sorted(totals.items(), key=lambda item: -item[1]) if spent > 0}


def start_profile() -> profile:
    """Starts a profiler and returns it; call ``stop()`` on it."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
    profiler.start()
    return profiler


class Stopwatch:
    """Seconds of a step by part: the time between two marks belongs to the second mark.

    On a GPU it records events in the stream and waits for them only in :meth:`seconds`.
    """

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str):
        event: Any
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self._marks.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Name -> seconds, summed over all marks of that name."""
        if self._gpu:
            self._marks[-1][1].synchronize()
        totals: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._marks[:-1], self._marks[1:], strict=True):
            spent = before.elapsed_time(after) / 1000 if self._gpu else after - before
            totals[name] = totals.get(name, 0.0) + spent
        return totals


class StepProfiler:
    """Records steps first .. first + count - 1 of a run; writes ``folder``/step-XXXXXXXX.json.gz and logs the shares.

    The trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing. first None: record nothing.
    """

    def __init__(self, folder: Path, first: int | None, count: int):
        self._folder, self._first, self._last = folder, first, (first or 0) + count - 1
        self._profiler: profile | None = None

    def before(self, step: int):
        if step == self._first:
            self._profiler = start_profile()

    def after(self, step: int):
        if self._profiler and step >= self._last:
            self.close()

    def close(self):
        """Ends a recording, even if some of its steps are missing.

        A full disk loses the profile but does not end the training.
        """
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._folder / f"step-{self._first:08d}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            log.warning("%s: the profile could not be written (%s)", path, error)
            return
        shares = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in time_shares(profiler).items())
        log.info("profile of step %d on: %s (%s)", self._first, shares, path)


class OutOfMemory:
    """Context around a step: if GPU memory runs out, writes a snapshot of all allocations and raises one UserError.

    The snapshot, ``folder``/memory-snapshot-rankR.pickle, opens at pytorch.org/memory_viz. Without a GPU no snapshot
    is written.
    """

    def __init__(self, folder: Path, device: torch.device, remedy: str, rank: int = 0):
        self._path, self._remedy = folder / f"memory-snapshot-rank{rank}.pickle", remedy
        self._gpu = device.type == "cuda"
        if self._gpu:  # record Python stacks only: C++ stacks at each allocation would double the cost
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)

    def __enter__(self):
        return self

    def __exit__(self, _kind, error: BaseException | None, _trace):
        if isinstance(error, torch.OutOfMemoryError):
            if self._gpu:
                torch.cuda.memory._dump_snapshot(str(self._path))
            raise UserError(f"out of GPU memory: {self._remedy}; memory snapshot: {self._path}") from error
