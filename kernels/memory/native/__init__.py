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
from titans_pt.kernels.memory.state import MemoryState, Weights, choose

SOURCE = Path(__file__).with_name("scan.c")
MAX_LAYERS = 8
ACTIVATIONS = ("gelu", "silu", "relu")
"""In the order of scan.c."""
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
    if network.depth > MAX_LAYERS:
        return f"memories of more than {MAX_LAYERS} layers"
    return native.unserved(SOURCE, x)


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
        compiled = native.library(SOURCE, tensors[0].dtype)
        native.run(compiled.reverse, rows, _operations(call), *map(ctypes.byref, (call, inputs, given)))
        return None, *grads[:6], None, *grads[6:], *d_state


@torch.no_grad()
def next_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    start: Weights,
    state: MemoryState,
    *,
    network: NetworkShape,
    norm: Weights | None,
    chunk_size: int,
    to_start: bool,
) -> tuple[Tensor, MemoryState]:
    """What a call of one token gives, for generation: nothing is cut into blocks, nothing is kept for gradients.

    q, k, v (B, 1, H, D); gates (B, 1, H, 1 or L); start (H, d_in, d_out), M_0; norm two (H, D), all of one dtype.
    """
    batch, _, heads, width = q.shape
    rows, layers = batch * heads, network.depth
    layers_of_gates = gates[0].shape[-1]
    # (B, 1, H, L) -> (L, 1, B H, 1); B H is the order of rows of all the others.
    given = [x.contiguous() for x in (q, k, v, *(g.permute(3, 1, 0, 2) for g in gates))]
    given += [p.expand(batch, heads, width).contiguous() for p in norm or ()]
    begin = [w.expand(batch, *w.shape).contiguous() for w in start] if to_start else []
    weights = [w.contiguous() for w in (*state.weights, *state.momentum, *state.chunk_weights)]
    if to_start:
        weights[:layers] = [w - w0 for w, w0 in zip(weights[:layers], begin, strict=True)]
    call = _Call(
        blocks=1, rows=rows, tokens=1, layers=layers, width=width, hidden=network.hidden, gate_layers=layers_of_gates,
        activation=ACTIVATIONS.index(network.activation), norm=network.norm, residual=network.residual,
        to_start=to_start,
    )  # fmt: skip
    offset = state.offset.tolist()
    new_chunk = (ctypes.c_uint8 * rows)(*(tokens == 0 for tokens in offset for _ in range(heads)))
    new_document = (ctypes.c_uint8 * rows)()
    names = ("q", "k", "v", "theta", "eta", "alpha", "gamma", "beta")
    inputs = _Inputs(
        **dict(zip(names, (x.data_ptr() for x in given), strict=False)),
        new_chunk=ctypes.addressof(new_chunk), new_document=ctypes.addressof(new_document),
        **_by_layer(begin, ("begin",)), **_by_layer(weights, ("W", "S", "F")),
    )  # fmt: skip
    out, after = torch.empty_like(given[0]), [torch.empty_like(w) for w in weights]
    outputs = _Outputs(out=out.data_ptr(), **_by_layer(after, ("W", "S", "F")))
    compiled = native.library(SOURCE, q.dtype)
    native.run(compiled.forward, rows, _operations(call), *map(ctypes.byref, (call, inputs, outputs)))
    if to_start:
        after[:layers] = [w.add_(w0) for w, w0 in zip(after[:layers], begin, strict=True)]
    now, momentum, frozen = (tuple(after[i * layers : (i + 1) * layers]) for i in range(3))
    offset = [(tokens + 1) % chunk_size for tokens in offset]
    if not any(offset):
        frozen = now
    elif not all(offset):
        frozen = choose(torch.tensor([tokens == 0 for tokens in offset]), now, frozen)
    return out, MemoryState(now, momentum, frozen, torch.tensor(offset))


def group(blocks: int, rows: int, network: NetworkShape, size: int, save_every: int | None) -> int:
    """Blocks between two states that are kept; size: bytes of a number."""
    states = blocks * rows * 3 * size * sum(a * b for a, b in network.layers)
    return min(save_every or -(-states // KEEP_BYTES), math.isqrt(blocks) if save_every is None else blocks) or 1


def _call(plan, q: Tensor) -> _Call:
    blocks, rows, tokens, width = q.shape
    network = plan.network
    return _Call(
        blocks=blocks, rows=rows, tokens=tokens, layers=network.depth, width=width, hidden=network.hidden,
        gate_layers=plan.gate_layers, activation=ACTIVATIONS.index(network.activation),
        norm=network.norm, residual=network.residual, to_start=plan.to_start,
    )  # fmt: skip


def _operations(call: _Call) -> int:
    """Of a forward pass, roughly."""
    return 20 * call.blocks * call.rows * call.tokens * call.width * call.hidden * call.layers


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
