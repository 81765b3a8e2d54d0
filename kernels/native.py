"""Kernels written in C, for CPUs: compiled on first use, in seconds, for the machine that they run on.

Compiled code is kept in the user's cache folder, under a name derived from the source, the compiler and the processor.
Without a compiler, or with TITANS_NATIVE=0, the slower PyTorch operators are used.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.kernels.common import transformed, warn_once
from titans_pt.tools.cache import cache_folder

HEADER = Path(__file__).with_name("vector.h")
"""Header that every source includes; headers next to a source also belong to it."""
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
REALS = {torch.float32: ["-DREAL=float"], torch.float64: ["-DREAL=double", "-DREAL_IS_DOUBLE"]}


PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors whose memory C can read."""


def unserved(source: Path, x: Tensor, *weights: Tensor | None) -> str | None:
    """Reason why ``source`` does not serve tensors of ``x``'s device and dtype, or reads no tensors of these classes;
    None if it serves."""
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    for tensor in (x, *weights):
        if tensor is not None and type(tensor) not in PLAIN:
            return f"{type(tensor).__name__} may have no memory of its own"  # FakeTensor, DTensor, torchao's weights
    if x.dtype not in REALS:
        return f"{x.dtype} is neither float32 nor float64"
    if reason := transformed():
        return reason
    found = library(source, x.dtype)
    return found if isinstance(found, str) else None


@cache
def library(source: Path, dtype: torch.dtype) -> ctypes.CDLL | str:
    """Compile and load ``source`` for ``dtype``; if that fails, return the reason.

    The answer is cached. Several processes may do this at once.
    """
    if os.environ.get("TITANS_NATIVE") == "0":
        return "TITANS_NATIVE=0"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))), None)
    if compiler is None:
        return "no C compiler (cc, gcc) is on the path"
    flags = [*FLAGS, *REALS[dtype]]
    try:
        texts = [path.read_text() for path in (source, HEADER, *sorted(source.parent.glob("*.h")))]
        key = chr(0).join([*texts, *flags, compiler, platform.machine(), _processor()])
        folder = cache_folder() / "native"
        path = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        with contextlib.suppress(OSError):  # missing, damaged, or made with a newer C library than this machine's
            return ctypes.CDLL(str(path))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as there:
            made = Path(there) / path.name
            done = subprocess.run(
                [compiler, *flags, str(source), "-o", str(made), "-lm"], capture_output=True, text=True
            )
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
                warn_once(f"{compiler} does not compile {source.name} (PyTorch serves, slower): {reason}")
                return f"{compiler} failed"
            os.replace(made, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        warn_once(f"{source.name} is not compiled or loaded (PyTorch serves, slower): {error}")
        return str(error)


@cache
def compiled(source: Path, dtype: torch.dtype) -> ctypes.CDLL:
    """The C functions of a source that :func:`unserved` accepts."""
    found = library(source, dtype)
    assert not isinstance(found, str), found  # callers ask unserved first
    return found


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process: a forked process has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


def _processor() -> str:
    """Processor that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor for a C source; NULL for None."""
    return None if tensor is None else tensor.data_ptr()


WORTH_A_THREAD = 2_000_000
"""Operations that take longer than handing them to another thread."""


def run(function: Callable, count: int, operations: int, *arguments) -> None:
    """Call function(*arguments, first, last) on ranges that together cover 0 to ``count``.

    The ranges run on as many threads as PyTorch uses, fewer if the total of ``operations`` is small.

    Raises:
        MemoryError: the function returned something other than 0.
    """
    worth = operations // WORTH_A_THREAD
    threads = min(torch.get_num_threads(), count, worth) if worth > 1 else 1
    if threads == 1:
        failed = function(*arguments, ctypes.c_int64(0), ctypes.c_int64(count))
    else:
        edges = [count * i // threads for i in range(threads + 1)]
        parts = [(ctypes.c_int64(a), ctypes.c_int64(b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        failed = any(list(_pool(os.getpid()).map(lambda part: function(*arguments, *part), parts)))
    if failed:
        raise MemoryError("no memory left for a kernel's work")
