"""The dual form in C, for CPUs: one row's weights stay in a core's cache while its blocks are processed (scan.c).

PyTorch operators over all rows at once move every weight set through the shared caches a dozen times per block.
"""

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.kernels import native
from titans_pt.kernels.blocks import Flag
from titans_pt.kernels.common import first_derivatives_only
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Rule
from titans_pt.kernels.memory.scan import ScanPlan

SOURCE = Path(__file__).with_name("scan.c")
HEADER = Path(__file__).with_name("network.h")
"""Header of scan.c and token.c. Named here, it becomes part of exported folders (titans_pt/huggingface/source.py)."""
MAX_LAYERS = 8
ACTIVATIONS = ("gelu", "silu", "relu")
"""Activations in the order of scan.c."""
KEEP_BYTES = 2**24
"""Most bytes of a call's kept states. If the states before all blocks need more, only one of several is kept:
recomputing the others takes less time than touching new memory."""


LOSSES = {"squared": False, "huber": True}
"""Losses in the order of scan.c, and whether they have a threshold; see Rule.compiled_loss."""


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


class _Places(ctypes.Structure):
    _fields_ = _integers("heads", "batch", "head", "block", "token")


class _Call(ctypes.Structure):
    _fields_ = [
        *_integers("blocks", "rows", "tokens", "keys", "layers", "width", "hidden", "gate_layers"),
        *_integers("activation", "norm", "residual", "to_start", "loss", "at_start", "erases", "silent", "every"),
        ("query", _Places), ("key", _Places),
    ]  # fmt: skip


def _pointers(*names: str, per_layer: tuple[str, ...] = (), last: tuple[str, ...] = ()):
    single = [(name, ctypes.c_void_p) for name in names]
    layers = [(name, ctypes.c_void_p * MAX_LAYERS) for name in per_layer]
    return [*single, *layers, *((name, ctypes.c_void_p) for name in last)]


GIVEN = ("q", "k", "v", "A", "B", "mix", "m", "e")
"""Tensors of every call, in order: queries, keys, values and the fields of Coefficients."""

ERASING = ("theta", "keep", "reach")
"""Tensors of a rule that erases: its gate, and the fields of Decay."""


class _Inputs(ctypes.Structure):
    _fields_ = _pointers(
        *GIVEN, "threshold", *ERASING, "gamma", "beta", "new_chunk", "new_document",
        per_layer=("begin", "W", "S", "F"), last=("kept",),
    )  # fmt: skip


class _Outputs(ctypes.Structure):
    _fields_ = _pointers("out", per_layer=("W", "S", "F"))


class _Gradients(ctypes.Structure):
    _fields_ = _pointers("out", *GIVEN, "threshold", *ERASING, "gamma", "beta", per_layer=("begin", "W", "S", "F"))


def unserved(x: Tensor, network: NetworkShape, source: Path = SOURCE) -> str | None:
    """Reason why ``source`` would not serve tensors of ``x``'s device and dtype; None if it would."""
    if network.depth > MAX_LAYERS:
        return f"memories of more than {MAX_LAYERS} layers"
    return native.unserved(source, x)


def thresholds(rule: Rule) -> int:
    """Number of own gates, the rule's first ones, that its loss reads."""
    return int(LOSSES[_loss(rule)])


def _loss(rule: Rule) -> str:
    """Name in C of the loss of a rule that C serves."""
    assert rule.compiled_loss is not None
    return rule.compiled_loss


def scan(plan: ScanPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply :class:`NativeScan` to tensors in any layout."""
    return NativeScan.apply(plan, *(x.contiguous() for x in tensors))


def answer(network: NetworkShape, *tensors: Tensor) -> Tensor:
    """Apply :class:`NativeAnswer` to tensors in any layout."""
    return NativeAnswer.apply(network, *(x.contiguous() for x in tensors))


class NativeScan(torch.autograd.Function):
    """apply(plan, q, k, v, *coefficients, *threshold, *erasing, *norm, *begin, *W, *S, *F) -> (out, *W, *S, *F).

    All tensors are contiguous. q (n, N, c, D), k and v (n, N, keys, D); with plan.whole all three (B, n c, H, D).
    coefficients: the fields of Coefficients for these keys, (gate_layers, n, N, ...); with plan.at_start and
    a rule that does not erase, A, B and mix have only their last line.
    With plan.silent nothing is read: q only carries the tokens' shape, and out has no meaning.
    threshold: (n, N, keys, 1), for a loss that has one. erasing: for a rule that erases, theta (gate_layers, n, N, c)
    and Decay's fields; coefficients are then for theta = 1. Other arguments and the results are as in
    :class:`titans_pt.kernels.memory.scan.MemoryScan`, but W is always the memory's weights.
    """

    @staticmethod
    def forward(ctx, plan: ScanPlan, *tensors: Tensor):
        layers, blocks, rows = plan.network.depth, len(plan.new_chunk), tensors[-1].shape[0]
        call = _call(plan, tensors)
        compiled = native.compiled(SOURCE, tensors[0].dtype)
        compiled.set_size.restype = ctypes.c_int64
        kept = None
        if plan.keep:
            call.every = plan.group
        if plan.keep and plan.group < blocks:
            kept = tensors[0].new_empty(-(-blocks // plan.group) * rows * 3 * compiled.set_size(ctypes.byref(call)))
        flags = _flags(plan.new_chunk, rows), _flags(plan.new_document, rows)
        inputs = _inputs(plan, tensors, flags, kept)
        out = torch.empty_like(tensors[0])
        state = [torch.empty_like(w) for w in tensors[-3 * layers :]]
        outputs = _Outputs(out=out.data_ptr(), **_by_layer(state, ("W", "S", "F")))
        native.run(compiled.forward, rows, _operations(call), *map(ctypes.byref, (call, inputs, outputs)))
        ctx.plan, ctx.every, ctx.flags = plan, call.every, flags
        ctx.save_for_backward(*tensors, kept)
        ctx.set_materialize_grads(False)
        return out, *state

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_out, *d_state):
        *tensors, kept = saved
        plan, layers = ctx.plan, ctx.plan.network.depth
        rows = tensors[-1].shape[0]
        call = _call(plan, tensors)
        call.every = ctx.every
        inputs = _inputs(plan, tensors, ctx.flags, kept)
        d_out = torch.zeros_like(tensors[0]) if d_out is None else d_out.contiguous()
        token_wise = len(_names(plan.rule))
        grads = [torch.empty_like(x) for x in tensors[:token_wise]]
        if plan.silent:
            grads[0].zero_()
        grads += [torch.zeros_like(x) for x in tensors[token_wise : -3 * layers]]
        d_begun = [
            torch.zeros_like(w) if d is None else d.clone(memory_format=torch.contiguous_format)
            for w, d in zip(tensors[-3 * layers :], d_state, strict=True)
        ]
        single, begin = _single(plan, grads)
        given = _Gradients(
            out=d_out.data_ptr(), **single, **_by_layer(begin, ("begin",)), **_by_layer(d_begun, ("W", "S", "F"))
        )
        compiled = native.compiled(SOURCE, tensors[0].dtype)
        native.run(compiled.reverse, rows, _operations(call), *map(ctypes.byref, (call, inputs, given)))
        return None, *grads, *d_begun


class NativeAnswer(torch.autograd.Function):
    """apply(network, q, *norm, *F) -> M(q) at weights F, nothing written.

    All contiguous: q (N, c, D). norm: two (N, 1, D), or none. F: L weights (N, d_in, d_out).
    """

    @staticmethod
    def forward(ctx, network: NetworkShape, *tensors: Tensor):
        out = torch.empty_like(tensors[0])
        _answer("answer", network, tensors, _Outputs(out=out.data_ptr()))
        ctx.network = network
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx, tensors, d_out: Tensor):
        first = 1 + 2 * ctx.network.norm
        d_out = d_out.contiguous()
        q, norm, weights = tensors[0], tensors[1:first], tensors[first:]
        grads = [torch.empty_like(q), *map(torch.zeros_like, norm), *map(torch.empty_like, weights)]
        given = _Gradients(out=d_out.data_ptr(), **_of_answer(grads, ctx.network))
        _answer("answer_reverse", ctx.network, tensors, given)
        return None, *grads


def _answer(name: str, network: NetworkShape, tensors: Sequence[Tensor], result: ctypes.Structure):
    q, places = tensors[0], _Places(heads=1, batch=tensors[0][0].numel(), token=tensors[0].shape[-1])
    call = _Call(
        blocks=1, rows=len(q), tokens=q.shape[1], keys=1, layers=network.depth, width=network.width,
        hidden=network.hidden, gate_layers=1, activation=ACTIVATIONS.index(network.activation), norm=network.norm,
        residual=network.residual, at_start=True, query=places,
    )  # fmt: skip
    inputs = _Inputs(**_of_answer(tensors, network))
    function = getattr(native.compiled(SOURCE, q.dtype), name)
    native.run(function, len(q), _operations(call) // 4, *map(ctypes.byref, (call, inputs, result)))


def _of_answer(tensors: Sequence[Tensor], network: NetworkShape) -> dict:
    """Addresses of the inputs of :class:`NativeAnswer`, or of their gradients."""
    names = ("q", "gamma", "beta")[: 1 + 2 * network.norm]
    single = {name: x.data_ptr() for name, x in zip(names, tensors, strict=False)}
    return single | _by_layer(tensors[len(names) :], ("F",))


def group(blocks: int, rows: int, network: NetworkShape, size: int, save_every: int | None) -> tuple[int, bool]:
    """Number of blocks between two kept states, and whether states are kept. size: bytes of a number."""
    states = blocks * rows * 3 * size * sum(a * b for a, b in network.layers)
    fewest = max(1, min(-(-states // KEEP_BYTES), math.isqrt(blocks)))
    return min(save_every or fewest, blocks), torch.is_grad_enabled()


def _call(plan: ScanPlan, tensors: Sequence[Tensor]) -> _Call:
    q, k, A, mix = tensors[0], tensors[1], tensors[3], tensors[5]
    network, (gate_layers, blocks, rows), keys = plan.network, A.shape[:3], mix.shape[-1]
    if plan.whole:
        length, heads, width = q.shape[1:]
        tokens, step = length // blocks, heads * width
        places = [_Places(heads, length * step, width, tokens * step, step)] * 2
    else:
        tokens = q.shape[2]
        places = [_Places(1, x[0, 0].numel(), 0, x[0].numel(), x.shape[-1]) for x in (q, k)]
    return _Call(
        blocks=blocks, rows=rows, tokens=tokens, keys=keys, layers=network.depth, width=network.width,
        hidden=network.hidden, gate_layers=gate_layers, activation=ACTIVATIONS.index(network.activation),
        norm=network.norm, residual=network.residual, to_start=plan.to_start,
        loss=list(LOSSES).index(_loss(plan.rule)), at_start=plan.at_start,
        erases=plan.rule.erases, silent=plan.silent, query=places[0], key=places[1],
    )  # fmt: skip


def _operations(call: _Call) -> int:
    """Approximate number of operations of a forward pass."""
    return 20 * call.blocks * call.rows * call.tokens * call.width * call.hidden * call.layers


def _flags(each: list[Flag], rows: int) -> ctypes.Array:
    """Flags of n blocks, each a bool or a tensor (N,) -> (n, N) bytes."""
    parts = (bytes([flag]) * rows if isinstance(flag, bool) else bytes(flag.tolist()) for flag in each)
    return ctypes.create_string_buffer(b"".join(parts), len(each) * rows)


def _names(rule: Rule) -> tuple[str, ...]:
    """Names of the tensors of tokens."""
    return (*GIVEN, *("threshold",)[: thresholds(rule)], *(ERASING if rule.erases else ()))


def _single(plan: ScanPlan, tensors: Sequence[Tensor]) -> tuple[dict[str, int], Sequence[Tensor]]:
    """Addresses by name of all tensors but weights, and the tensors of M_0.

    tensors: arguments of apply or their gradients, without W, S and F.
    """
    names = _names(plan.rule) + ("gamma", "beta")[: 2 * plan.network.norm]
    return {name: x.data_ptr() for name, x in zip(names, tensors, strict=False)}, tensors[len(names) :]


def _inputs(
    plan: ScanPlan, tensors: Sequence[Tensor], flags: tuple[ctypes.Array, ctypes.Array], kept: Tensor | None
) -> _Inputs:
    layers = plan.network.depth
    single, begin = _single(plan, tensors[: -3 * layers])
    return _Inputs(
        **single, kept=None if kept is None else kept.data_ptr(),
        new_chunk=ctypes.addressof(flags[0]), new_document=ctypes.addressof(flags[1]),
        **_by_layer(begin, ("begin",)), **_by_layer(tensors[-3 * layers :], ("W", "S", "F")),
    )  # fmt: skip


def _by_layer(tensors: Sequence[Tensor], names: tuple[str, ...]) -> dict:
    layers = len(tensors) // len(names)
    array = ctypes.c_void_p * MAX_LAYERS
    return {
        name: array(*(w.data_ptr() for w in tensors[i * layers : (i + 1) * layers])) for i, name in enumerate(names)
    }
