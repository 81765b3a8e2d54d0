"""The dual form in C, for CPUs: one row's weights stay in a core's cache while its blocks pass (scan.c).

PyTorch operators over all rows at once move every weight set through the shared caches a dozen times per block. The
source is compiled for the machine that it runs on, by whatever C compiler is there, when it is first needed (seconds),
and kept in the user's cache folder. Where that is not possible, or with TITANS_NATIVE=0, PyTorch operators serve.
"""

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch import Tensor

from titans_pt.kernels.common import warn_once
from titans_pt.kernels.memory.network import NetworkShape

SOURCE = Path(__file__).with_name("scan.c")
MAX_LAYERS = 8
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
REALS = {torch.float32: ["-DREAL=float"], torch.float64: ["-DREAL=double", "-DREAL_IS_DOUBLE"]}
KEEP_BYTES = 2**24
"""What the kept states of a call may occupy. Where those before all blocks are more, one of several is kept: computing
the others again takes less time than memory that was never touched before."""


class _Call(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("blocks", "rows", "tokens", "layers", "width", "hidden", "gate_layers",
                     "activation", "norm", "residual", "to_start", "every")
    ]  # fmt: skip


def _pointers(*names: str, per_layer: tuple[str, ...] = (), last: tuple[str, ...] = ()):
    single = [(name, ctypes.c_void_p) for name in names]
    layers = [(name, ctypes.c_void_p * MAX_LAYERS) for name in per_layer]
    return [*single, *layers, *((name, ctypes.c_void_p) for name in last)]


class _Inputs(ctypes.Structure):
    _fields_ = _pointers(
        "q", "k", "v", "theta", "eta", "alpha", "valid", "gamma", "beta", "new_chunk", "new_document",
        per_layer=("begin", "W", "S", "F"), last=("kept",),
    )  # fmt: skip


class _Outputs(ctypes.Structure):
    _fields_ = _pointers("out", per_layer=("W", "S", "F"))


class _Gradients(ctypes.Structure):
    _fields_ = _pointers(
        "out", "q", "k", "v", "theta", "eta", "alpha", "gamma", "beta", per_layer=("begin", "W", "S", "F")
    )


def unserved(x: Tensor, network: NetworkShape) -> str | None:
    """Why this would not serve blocks of ``x``'s device and dtype; None if it would."""
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in REALS:
        return f"{x.dtype} is neither float32 nor float64"
    if network.depth > MAX_LAYERS:
        return f"memories of more than {MAX_LAYERS} layers"
    if isinstance(library(x.dtype), str):
        return library(x.dtype)
    return None


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The compiled source, or why there is none."""
    if os.environ.get("TITANS_NATIVE") == "0":
        return "TITANS_NATIVE=0"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))), None)
    if compiler is None:
        return "no C compiler (cc, gcc) is on the path"
    flags = [*FLAGS, *REALS[dtype]]
    key = [SOURCE.read_text(), *flags, compiler, platform.machine(), _processor()]
    folder = user_cache_path("titans-pt") / "native"
    path = folder / f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as there:
                made = Path(there) / path.name
                command = [compiler, *flags, str(SOURCE), "-o", str(made), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
                    warn_once(f"neural_memory: {compiler} does not compile its C source (PyTorch serves): {reason}")
                    return f"{compiler} failed"
                os.replace(made, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        warn_once(f"neural_memory: its C source is not compiled or loaded (PyTorch serves, slower): {error}")
        return str(error)


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


class NativeScan(torch.autograd.Function):
    """apply(plan, q, k, v, theta, eta, alpha, valid, *norm, *begin, *W, *S, *F) -> (out, *W, *S, *F).

    q, k, v: (n, N, c, D). theta, eta, alpha: (gate_layers, n, N, c); valid: (n, N, c) or None. The others and the
    results as those of :class:`titans_pt.kernels.memory.scan.MemoryScan`.
    """

    @staticmethod
    def forward(ctx, plan, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, valid, *rest):
        layers, blocks, rows = plan.network.depth, q.shape[0], q.shape[1]
        tensors = [x.contiguous() for x in (q, k, v, theta, eta, alpha, *rest)]
        if valid is not None:
            valid = valid.to(q.dtype).contiguous()
        call = _call(plan, tensors[0])
        native = library(q.dtype)
        native.set_size.restype = ctypes.c_int64
        kept = None
        if plan.keep:
            call.every = plan.group
            kept = q.new_empty(-(-blocks // plan.group) * rows * 3 * native.set_size(ctypes.byref(call)))
        flags = _flags(plan.new_chunk, rows), _flags(plan.new_document, rows)
        inputs = _inputs(plan, tensors, valid, flags, kept)
        out = torch.empty_like(tensors[0])
        state = [torch.empty_like(w) for w in tensors[-3 * layers :]]
        outputs = _Outputs(out=out.data_ptr(), **_by_layer(state, ("W", "S", "F")))
        _run(native.forward, rows, call, inputs, outputs)
        ctx.plan, ctx.every, ctx.flags = plan, call.every, flags
        ctx.save_for_backward(*tensors, valid, kept)
        ctx.set_materialize_grads(False)
        return out, *state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, *d_state):
        *tensors, valid, kept = ctx.saved_tensors
        plan, layers, rows = ctx.plan, ctx.plan.network.depth, tensors[0].shape[1]
        call = _call(plan, tensors[0])
        call.every = ctx.every
        inputs = _inputs(plan, tensors, valid, ctx.flags, kept)
        d_out = torch.zeros_like(tensors[0]) if d_out is None else d_out.contiguous()
        grads = [torch.empty_like(x) for x in tensors[:6]] + [torch.zeros_like(x) for x in tensors[6 : -3 * layers]]
        state = tensors[-3 * layers :]
        d_state = [torch.zeros_like(w) if d is None else d.clone(memory_format=torch.contiguous_format)
                   for w, d in zip(state, d_state, strict=True)]
        norm, begin = grads[6 : 6 + 2 * plan.network.norm], grads[6 + 2 * plan.network.norm :]
        pointers = dict(zip(("q", "k", "v", "theta", "eta", "alpha"), (g.data_ptr() for g in grads), strict=False))
        pointers |= dict(zip(("gamma", "beta"), (g.data_ptr() for g in norm), strict=False))
        given = _Gradients(
            out=d_out.data_ptr(), **pointers, **_by_layer(d_state, ("W", "S", "F")), **_by_layer(begin, ("begin",))
        )
        _run(library(tensors[0].dtype).reverse, rows, call, inputs, given)
        return None, *grads[:6], None, *grads[6:], *d_state


def group(blocks: int, rows: int, network: NetworkShape, size: int, save_every: int | None) -> int:
    """Blocks between two states that are kept; size: bytes of a number."""
    states = blocks * rows * 3 * size * sum(a * b for a, b in network.layers)
    return min(save_every or -(-states // KEEP_BYTES), math.isqrt(blocks) if save_every is None else blocks) or 1


def _call(plan, q: Tensor) -> _Call:
    blocks, rows, tokens, width = q.shape
    network = plan.network
    return _Call(
        blocks=blocks, rows=rows, tokens=tokens, layers=network.depth, width=width, hidden=network.hidden,
        gate_layers=plan.gate_layers, activation=("gelu", "silu", "relu").index(network.activation),
        norm=network.norm, residual=network.residual, to_start=plan.to_start,
    )  # fmt: skip


def _flags(each: list, rows: int) -> Tensor:
    """Per block a bool or a tensor (N,) -> (n, N) uint8."""
    if all(isinstance(flag, bool) for flag in each):
        return torch.tensor(each, dtype=torch.uint8)[:, None].expand(-1, rows).contiguous()
    full = [torch.full((rows,), flag) if isinstance(flag, bool) else flag for flag in each]
    return torch.stack(full).to(torch.uint8)


def _inputs(plan, tensors: list[Tensor], valid: Tensor | None, flags: tuple[Tensor, Tensor], kept: Tensor | None):
    layers = plan.network.depth
    q, k, v, theta, eta, alpha, *rest = tensors
    norm, begin, state = rest[: 2 * plan.network.norm], rest[2 * plan.network.norm : -3 * layers], rest[-3 * layers :]
    names = ("q", "k", "v", "theta", "eta", "alpha", "gamma", "beta")
    pointers = dict(zip(names, (x.data_ptr() for x in (q, k, v, theta, eta, alpha, *norm)), strict=False))
    return _Inputs(
        **pointers,
        valid=None if valid is None else valid.data_ptr(), kept=None if kept is None else kept.data_ptr(),
        new_chunk=flags[0].data_ptr(), new_document=flags[1].data_ptr(),
        **_by_layer(begin, ("begin",)), **_by_layer(state, ("W", "S", "F")),
    )  # fmt: skip


def _by_layer(tensors: list[Tensor], names: tuple[str, ...]) -> dict:
    layers = len(tensors) // len(names)
    array = ctypes.c_void_p * MAX_LAYERS
    return {
        name: array(*(w.data_ptr() for w in tensors[i * layers : (i + 1) * layers])) for i, name in enumerate(names)
    }


def _run(function, rows: int, *structures):
    """function(..., first row, last row) for all rows, shared out over as many threads as PyTorch would use."""
    threads = min(torch.get_num_threads(), rows)
    edges = [rows * i // threads for i in range(threads + 1)]
    arguments = [ctypes.byref(s) for s in structures]
    parts = [(ctypes.c_int64(a), ctypes.c_int64(b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    if threads == 1:
        failed = function(*arguments, *parts[0])
    else:
        with ThreadPoolExecutor(threads) as pool:
            failed = any(pool.map(lambda part: function(*arguments, *part), parts))
    if failed:
        raise MemoryError("neural_memory: no memory left for the blocks of a call")
