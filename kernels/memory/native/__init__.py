"""The dual form in C, for CPUs: one row's weights stay in a core's cache while its blocks pass (scan.c).

PyTorch operators over all rows at once move every weight set through the shared caches a dozen times per block.
"""

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.kernels import native
from titans_pt.kernels.memory.network import NetworkShape

SOURCE = Path(__file__).with_name("scan.c")
HEADER = Path(__file__).with_name("network.h")
"""Header of scan.c and token.c. Named here, it becomes part of exported folders (titans_pt/huggingface/source.py)."""
MAX_LAYERS = 8
ACTIVATIONS = ("gelu", "silu", "relu")
"""Activations in the order of scan.c."""
KEEP_BYTES = 2**24
"""Most bytes of a call's kept states. If the states before all blocks need more, one of several is kept: computing the
others again takes less time than touching new memory."""


class _Call(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("blocks", "rows", "tokens", "layers", "width", "hidden", "gate_layers",
                     "activation", "norm", "residual", "to_start", "every",
                     "heads", "batch", "head", "block", "token",
                     "gate_batch", "gate_head", "gate_block", "gate_token", "gate_layer")
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


def unserved(x: Tensor, network: NetworkShape, source: Path = SOURCE) -> str | None:
    """Reason why ``source`` would not serve tensors of ``x``'s device and dtype; None if it would."""
    if network.depth > MAX_LAYERS:
        return f"memories of more than {MAX_LAYERS} layers"
    return native.unserved(source, x)


class NativeScan(torch.autograd.Function):
    """apply(plan, q, k, v, theta, eta, alpha, valid, *norm, *begin, *W, *S, *F) -> (out, *W, *S, *F).

    Blocks that are the same in every row, valid None: q, k, v (B, n c, H, D), gates (B, n c, H, gate_layers). Else
    q, k, v (n, N, c, D), gates (gate_layers, n, N, c), valid (n, N, c). The others and the results as those of
    :class:`titans_pt.kernels.memory.scan.MemoryScan`, but W is always the memory's weights.
    """

    @staticmethod
    def forward(ctx, plan, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, valid, *rest):
        layers, blocks, rows = plan.network.depth, len(plan.new_chunk), rest[-1].shape[0]
        tensors = [x.contiguous() for x in (q, k, v, theta, eta, alpha, *rest)]
        if valid is not None:
            valid = valid.to(q.dtype).contiguous()
        call = _call(plan, tensors[0], valid is not None, rows)
        compiled = native.library(SOURCE, q.dtype)
        compiled.set_size.restype = ctypes.c_int64
        kept = None
        if plan.keep:
            call.every = plan.group
            kept = q.new_empty(-(-blocks // plan.group) * rows * 3 * compiled.set_size(ctypes.byref(call)))
        flags = _flags(plan.new_chunk, rows), _flags(plan.new_document, rows)
        inputs = _inputs(plan, tensors, valid, flags, kept)
        out = torch.empty_like(tensors[0])
        state = [torch.empty_like(w) for w in tensors[-3 * layers :]]
        outputs = _Outputs(out=out.data_ptr(), **_by_layer(state, ("W", "S", "F")))
        native.run(compiled.forward, rows, _operations(call), *map(ctypes.byref, (call, inputs, outputs)))
        ctx.plan, ctx.every, ctx.flags = plan, call.every, flags
        ctx.save_for_backward(*tensors, valid, kept)
        ctx.set_materialize_grads(False)
        return out, *state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, *d_state):
        *tensors, valid, kept = ctx.saved_tensors
        plan, layers, rows = ctx.plan, ctx.plan.network.depth, tensors[-1].shape[0]
        call = _call(plan, tensors[0], valid is not None, rows)
        call.every = ctx.every
        inputs = _inputs(plan, tensors, valid, ctx.flags, kept)
        d_out = torch.zeros_like(tensors[0]) if d_out is None else d_out.contiguous()
        grads = [torch.empty_like(x) for x in tensors[:6]] + [torch.zeros_like(x) for x in tensors[6 : -3 * layers]]
        state = tensors[-3 * layers :]
        d_state = [
            torch.zeros_like(w) if d is None else d.clone(memory_format=torch.contiguous_format)
            for w, d in zip(state, d_state, strict=True)
        ]
        norm, begin = grads[6 : 6 + 2 * plan.network.norm], grads[6 + 2 * plan.network.norm :]
        pointers = dict(zip(("q", "k", "v", "theta", "eta", "alpha"), (g.data_ptr() for g in grads), strict=False))
        pointers |= dict(zip(("gamma", "beta"), (g.data_ptr() for g in norm), strict=False))
        given = _Gradients(
            out=d_out.data_ptr(), **pointers, **_by_layer(d_state, ("W", "S", "F")), **_by_layer(begin, ("begin",))
        )
        compiled = native.library(SOURCE, tensors[0].dtype)
        native.run(compiled.reverse, rows, _operations(call), *map(ctypes.byref, (call, inputs, given)))
        return None, *grads[:6], None, *grads[6:], *d_state


def group(blocks: int, rows: int, network: NetworkShape, size: int, save_every: int | None) -> tuple[int, bool]:
    """Blocks between two states that are kept, and whether any is; size: bytes of a number."""
    states = blocks * rows * 3 * size * sum(a * b for a, b in network.layers)
    fewest = max(1, min(-(-states // KEEP_BYTES), math.isqrt(blocks)))
    return min(save_every or fewest, blocks), torch.is_grad_enabled()


def _call(plan, q: Tensor, folded: bool, rows: int) -> _Call:
    network, blocks, width, layers = plan.network, len(plan.new_chunk), q.shape[-1], plan.gate_layers
    if folded:
        c = q.shape[2]
        places = {"heads": 1, "batch": c * width, "head": 0, "block": rows * c * width, "token": width}
        gates = {"batch": c, "head": 0, "block": rows * c, "token": 1, "layer": blocks * rows * c}
    else:
        length, heads = q.shape[1:3]
        c = length // blocks
        places = _places(length, heads, width, c)
        gates = _places(length, heads, layers, c) | {"layer": 1}
        del gates["heads"]
    return _Call(
        blocks=blocks, rows=rows, tokens=c, layers=network.depth, width=width, hidden=network.hidden,
        gate_layers=layers, activation=ACTIVATIONS.index(network.activation), norm=network.norm,
        residual=network.residual, to_start=plan.to_start, **places,
        **{f"gate_{name}": step for name, step in gates.items()},
    )  # fmt: skip


def _places(length: int, heads: int, width: int, c: int) -> dict[str, int]:
    """Strides of a tensor (B, T, heads, width) that is read in blocks of c tokens."""
    return {
        "heads": heads, "batch": length * heads * width, "head": width, "block": c * heads * width,
        "token": heads * width,
    }  # fmt: skip


def _operations(call: _Call) -> int:
    """Approximate number of operations of a forward pass."""
    return 20 * call.blocks * call.rows * call.tokens * call.width * call.hidden * call.layers


def _flags(each: list, rows: int) -> ctypes.Array:
    """Per block a bool or a tensor (N,) -> (n, N) bytes."""
    parts = (bytes([flag]) * rows if isinstance(flag, bool) else bytes(flag.tolist()) for flag in each)
    return ctypes.create_string_buffer(b"".join(parts), len(each) * rows)


def _inputs(
    plan, tensors: list[Tensor], valid: Tensor | None, flags: tuple[ctypes.Array, ctypes.Array], kept: Tensor | None
) -> _Inputs:
    layers = plan.network.depth
    q, k, v, theta, eta, alpha, *rest = tensors
    norm, begin, state = rest[: 2 * plan.network.norm], rest[2 * plan.network.norm : -3 * layers], rest[-3 * layers :]
    names = ("q", "k", "v", "theta", "eta", "alpha", "gamma", "beta")
    pointers = dict(zip(names, (x.data_ptr() for x in (q, k, v, theta, eta, alpha, *norm)), strict=False))
    return _Inputs(
        **pointers,
        valid=None if valid is None else valid.data_ptr(), kept=None if kept is None else kept.data_ptr(),
        new_chunk=ctypes.addressof(flags[0]), new_document=ctypes.addressof(flags[1]),
        **_by_layer(begin, ("begin",)), **_by_layer(state, ("W", "S", "F")),
    )  # fmt: skip


def _by_layer(tensors: list[Tensor], names: tuple[str, ...]) -> dict:
    layers = len(tensors) // len(names)
    array = ctypes.c_void_p * MAX_LAYERS
    return {
        name: array(*(w.data_ptr() for w in tensors[i * layers : (i + 1) * layers])) for i, name in enumerate(names)
    }
