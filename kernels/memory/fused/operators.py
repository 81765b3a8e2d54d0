"""The kernels as PyTorch operators: opaque to torch.compile, with fake implementations, and differentiable.

Rows are (batch, head). A set of weights is packed, (..., L, D hidden): see scan.py. A state is (3, B, H, L, D hidden),
fp32: weights, momentum, weights at the chunk's start. With to_start its weights are differences to ``begin``, M_0
(except in memory_step): a difference forgotten to zero is a weight forgotten to M_0. Nothing here reads a tensor on the
host.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from titans_pt.kernels.memory.fused import coefficients, deferred, layout, read, scan
from titans_pt.kernels.memory.fused import step as decoding
from titans_pt.kernels.memory.fused.configurations import KERNELS, block_tokens, chunk_tokens, precision, scale
from titans_pt.kernels.memory.fused.deferred import MIXES, TURNED
from titans_pt.kernels.memory.fused.functions import VECTORS
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.namespace import namespace

NAMESPACE = namespace(__name__, __file__)

SCRATCH_BYTES = 2 << 30
"""Most bytes of scratch memory for the blocks between two kept states, unless save_every says otherwise. All layers
share it. With more scratch memory each layer keeps less; what it keeps rises with the square of the rows. At 8 rows of
4,096 tokens the 12 layers of the 170M model keep 0.8 GiB, the 24 layers of the 1.3B model 6.8 GiB."""


class Call:
    """Sizes of a call, its groups of blocks, and the kernels' launch parameters.

    ``every`` blocks form a group: the state before each group is kept for the backward pass; everything else of a group
    lives in scratch memory that the next group reuses. With R = B H rows, blocks of c tokens, operands of b bytes, h
    hidden units (h = D for L = 1), G gates of a token, the peak in bytes beyond inputs, outputs and their gradients is
    at most

        groups * R * 12 L D h                                             kept from forward to backward
      + every * R * (2 b L D h + c D (12 + 2 b) + c h (8 + 6 b) [L = 2]   scratch of the backward pass
                     + 4 c c (G + L) + 5 b c c [several chunks in a block] + 24 c (G + L) + 12 L + 8 D)
      + R * (12 + b) L D h                                                the state's gradient, frozen weights

    ``every`` is as large as SCRATCH_BYTES allows: a model's layers use scratch one after the other, but kept states
    stay.
    """

    def __init__(self, q, gate, network: NetworkShape, to_start: bool, offset, chunk, resets, save_every):
        self.batch, self.length, self.heads, width = q.shape
        self.rows, self.device, self.operand = self.batch * self.heads, q.device, q.dtype
        self.layers, gates = network.depth, gate.shape[-1]
        self.size = sum(a * b for a, b in network.layers)
        self.chunk, self.block = chunk, block_tokens(chunk, self.length)
        self.chunks = chunk_tokens(chunk, self.block)
        self.several = self.chunks["STEP"] < self.block  # a block holds several chunks
        self.blocks = layout.count(self.length, chunk, self.block, offset is not None, resets)
        self.constants = {
            "D": width, "HIDDEN": network.layers[0][1], "BLOCK": self.block, "LAYERS": self.layers, "GATES": gates,
            "NORM": network.norm, "RESIDUAL": network.residual, "TO_START": to_start, "ACTIVATION": network.activation,
            "PRECISION": precision(q.dtype), "SCALE": scale(q.dtype, chunk),
        }  # fmt: skip
        fit = max(1, SCRATCH_BYTES // (self.rows * self.block_bytes()))
        groups = -(-self.blocks // min(save_every or fit, self.blocks))
        self.every = save_every or -(-self.blocks // groups)
        self.groups = -(-self.blocks // self.every)

    def shapes(self, backward: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Scratch tensors of one block of one row. Their meaning: scan.py, deferred.py, read.py, coefficients.py."""
        c, D, h, layers, gates = (self.constants[n] for n in ("BLOCK", "D", "HIDDEN", "LAYERS", "GATES"))
        full, operand = torch.float32, self.operand
        wide = (c, h) if layers == 2 else (0,)
        vectors, several = VECTORS.value, self.several
        found = {
            "P": ((gates, c, c), full), "vectors": ((gates, vectors, c), full),
            "weights": ((self.size,), operand), "momenta": ((self.size,), operand),
            "hidden": (wide, operand), "pulled": (wide, operand), "active": (wide, operand), "bent": (wide, operand),
            "output": ((c, D), full), "error": ((c, D), operand), "mixes": ((several * MIXES.value, c, c), operand),
        }  # fmt: skip
        if backward:
            found |= {
                "query_active": (wide, operand), "d_query_hidden": (wide, operand),
                "d_out": ((c, D), operand), "d_input": (wide, full), "d_hidden": (wide, full),
                "d_error": ((c, D), full), "d_key": ((c, D), full), "d_norm_read": ((2, D), full),
                "d_mix": ((layers, c, c), full), "d_vectors": ((layers, vectors, c), full),
                "d_ends": ((layers, 3), full), "turned": ((several * TURNED.value, c, c), operand),
            }  # fmt: skip
        return found

    def block_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(True).values())

    def scratch(self, backward: bool) -> SimpleNamespace:
        """Tensors for a group's blocks, with one more set of weights: the frozen weights at the group's start."""
        every = min(self.every, self.blocks)
        return SimpleNamespace(**{
            name: torch.empty(self.rows * (every + (name == "weights")), *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.shapes(backward).items()
        })  # fmt: skip

    def group(self, number: int) -> tuple[int, int]:
        """First block of a group, and its number of blocks."""
        first = number * self.every
        return first, min(self.every, self.blocks - first)

    def launch(self, kernel, number: int, *tensors: Tensor, parallel: bool, **constants):
        """Launch one of scan's or read's kernels for a group. parallel: one program per row and block, not per row."""
        first, blocks = self.group(number)
        width = self.constants["D"]
        chosen = KERNELS[kernel.__name__][width]
        constants |= {"SLICE": min(chosen.slice, self.constants["HIDDEN"]) if self.layers == 2 else width}
        kernel[(self.rows, blocks) if parallel else (self.rows,)](
            *tensors, self.length, self.heads, self.blocks, first, blocks, **self.constants, **constants,
            num_warps=chosen.warps, num_stages=1,
        )  # fmt: skip

    def launch_gates(self, kernel, number: int, *tensors: Tensor, **constants):
        """Launches a kernel of coefficients.py for a group."""
        first, blocks = self.group(number)
        kernel[(self.rows, blocks, self.constants["GATES"])](
            *tensors, self.length, self.heads, self.blocks, first, blocks,
            BLOCK=self.block, GATES=self.constants["GATES"], **constants,
            num_warps=KERNELS[kernel.__name__][self.constants["D"]].warps, num_stages=1,
        )  # fmt: skip

    def play(self, number: int, q, k, v, gates, begin, base, norm, info, state, scratch, reset: bool):
        """Compute coefficients and states of a group's blocks into ``scratch``; moves ``state`` past the group."""
        s = scratch
        self.launch_gates(coefficients.coefficients, number, *gates, info, s.P, s.vectors)
        self.launch(
            scan.scan, number, k, v, info, begin, base, norm, s.P, s.vectors, *state, s.weights, s.momenta, s.hidden,
            s.pulled, s.active, s.bent, s.output, s.error, s.mixes, parallel=False, RESET=reset, **self.chunks,
        )  # fmt: skip


def _network(q: Tensor, begin: Tensor, norm: Tensor | None, residual: bool, activation: str) -> NetworkShape:
    """Network shape from the arguments of an operator, which are tensors and plain values."""
    width, (_, layers, size) = q.shape[-1], begin.shape
    return NetworkShape(width, size // width, layers, norm is not None, residual, activation)


def _prepare(q, theta, begin, norm, offset, reset, chunk, resets, residual, activation, to_start, save_every):
    """The call, its table of blocks, M_0 as an operand, and norm; the last two as tensors that a kernel accepts."""
    network = _network(q, begin, norm, residual, activation)
    call = Call(q, theta, network, to_start, offset, chunk, resets, save_every)
    if offset is None:
        offset = torch.zeros(call.batch, dtype=torch.int64, device=q.device)
    info = layout.table(call.length, chunk, call.block, call.blocks, offset, reset)
    return call, info, begin.to(q.dtype) if to_start else begin, begin if norm is None else norm


@torch.library.custom_op(f"{NAMESPACE}::memory", mutates_args=())
def memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    begin: Tensor,
    norm: Tensor | None,
    state: Tensor,
    offset: Tensor | None,
    reset: Tensor | None,
    chunk: int,
    resets: int,
    residual: bool,
    activation: str,
    to_start: bool,
    save_every: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The memory along a sequence, all tensors contiguous and on one device.

    q, k, v (B, T, H, D), one dtype; theta, eta, alpha (B, T, H, 1 or L) fp32; begin (H, L, D hidden) fp32, M_0, to
    which a reset returns; norm (2, H, D) fp32; offset (B,) int64, None for 0; reset (B, T) bool, at most ``resets`` in
    each row; save_every: blocks of a group, 0 for as many as SCRATCH_BYTES allows; keep: whether to keep states for a
    backward pass.

    Returns outputs (B, T, H, D), the state after the last token, and the kept states (groups, 3, B, H, L, D hidden).
    """
    call, info, base, affine = _prepare(
        q, theta, begin, norm, offset, reset, chunk, resets, residual, activation, to_start, save_every
    )
    out, state = torch.empty_like(q), state.clone()
    kept = state.new_empty(call.groups if keep else 0, *state.shape)
    s = call.scratch(False)
    with torch.cuda.device_of(q):
        for n in range(call.groups):
            if keep:
                kept[n] = state
            call.play(n, q, k, v, (theta, eta, alpha), begin, base, affine, info, state, s, reset is not None)
            call.launch(
                read.read, n, q, k, info, base, affine, s.P, s.vectors, s.weights, s.momenta, s.active, s.bent,
                s.error, out, parallel=True,
            )  # fmt: skip
    return out, state, kept


@memory.register_fake
def _(q, k, v, theta, eta, alpha, begin, norm, state, offset, reset, chunk, resets, residual, activation, to_start,
      save_every, keep):  # fmt: skip
    call = Call(q, theta, _network(q, begin, norm, residual, activation), to_start, offset, chunk, resets, save_every)
    return torch.empty_like(q), torch.empty_like(state), state.new_empty(call.groups if keep else 0, *state.shape)


@torch.library.custom_op(f"{NAMESPACE}::memory_backward", mutates_args=())
def memory_backward(
    d_out: Tensor,
    d_state: Tensor,
    kept: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    begin: Tensor,
    norm: Tensor | None,
    offset: Tensor | None,
    reset: Tensor | None,
    chunk: int,
    resets: int,
    residual: bool,
    activation: str,
    to_start: bool,
    save_every: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, theta, eta, alpha, begin, norm (one place without it) and state; see :func:`memory`."""
    call, info, base, affine = _prepare(
        q, theta, begin, norm, offset, reset, chunk, resets, residual, activation, to_start, save_every
    )
    gates = theta, eta, alpha
    d_q, d_k, d_v, d_theta, d_eta, d_alpha = (torch.empty_like(x) for x in (q, k, v, *gates))
    d_state = d_state.clone()
    d_begin = begin.new_zeros(call.batch if reset is not None or to_start else 0, *begin.shape)
    d_norm = begin.new_zeros(call.batch, call.heads, 2, call.constants["D"]) if norm is not None else begin.new_zeros(1)
    s = call.scratch(True)
    has_reset = reset is not None
    with torch.cuda.device_of(q):
        for n in reversed(range(call.groups)):
            call.play(n, q, k, v, gates, begin, base, affine, info, kept[n].clone(), s, has_reset)
            between = (
                s.query_active, s.d_query_hidden, s.d_out, s.d_input, s.d_hidden, s.d_error, s.d_key, s.d_norm_read,
            )  # fmt: skip
            call.launch(
                read.read_backward, n, q, k, d_out, info, base, affine, s.P, s.vectors, s.weights, s.momenta, s.active,
                s.bent, s.error, *between, s.d_mix, s.d_vectors, d_q, parallel=True,
            )  # fmt: skip
            call.launch(
                scan.scan_backward, n, q, k, v, info, base, affine, s.P, s.vectors, s.weights, s.momenta, s.hidden,
                s.pulled, s.active, s.bent, s.output, s.error, s.mixes, *between, s.turned, *d_state, d_begin, d_norm,
                s.d_vectors, s.d_ends, d_k, d_v, parallel=False, RESET=has_reset, **call.chunks,
            )  # fmt: skip
            if call.several:
                call.launch(
                    deferred.chunk_gradients, n, k, info, base, s.P, s.vectors, s.weights, s.momenta, s.hidden,
                    s.pulled, s.active, s.bent, s.error, s.d_error, s.d_key, s.d_mix, s.d_vectors, d_k, parallel=True,
                    **call.chunks,
                )  # fmt: skip
            call.launch_gates(
                coefficients.coefficients_backward, n, eta, alpha, info, s.P, s.vectors, s.d_mix, s.d_vectors,
                s.d_ends, d_theta, d_eta, d_alpha, LAYERS=call.layers,
            )  # fmt: skip
    d_norm = d_norm.sum(0).transpose(0, 1).contiguous() if norm is not None else d_norm
    return d_q, d_k, d_v, d_theta, d_eta, d_alpha, d_begin.sum(0), d_norm, d_state


@memory_backward.register_fake
def _(d_out, d_state, kept, q, k, v, theta, eta, alpha, begin, norm, offset, reset, chunk, resets, residual,
      activation, to_start, save_every):  # fmt: skip
    d_norm = begin.new_empty(1) if norm is None else torch.empty_like(norm)
    return *(torch.empty_like(x) for x in (q, k, v, theta, eta, alpha, begin)), d_norm, torch.empty_like(d_state)


def _setup(ctx, inputs, output):
    *tensors, chunk, resets, residual, activation, to_start, save_every, keep = inputs
    q, k, v, theta, eta, alpha, begin, norm, _, offset, reset = tensors
    ctx.save_for_backward(q, k, v, theta, eta, alpha, begin, norm, offset, reset, output[2])
    ctx.settings = chunk, resets, residual, activation, to_start, save_every
    ctx.state_shape = output[1].shape
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_state, _):
    *tensors, offset, reset, kept = ctx.saved_tensors
    q, begin, norm = tensors[0], tensors[6], tensors[7]
    d_out = torch.zeros_like(q) if d_out is None else d_out.contiguous()
    d_state = begin.new_zeros(ctx.state_shape) if d_state is None else d_state.contiguous()
    *grads, d_norm, d_first = memory_backward(d_out, d_state, kept, *tensors, offset, reset, *ctx.settings)
    return *grads, None if norm is None else d_norm, d_first, *(None,) * 9


memory.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op(f"{NAMESPACE}::memory_step", mutates_args=())
def memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    begin: Tensor,
    norm: Tensor | None,
    state: Tensor,
    offset: Tensor,
    chunk: int,
    residual: bool,
    activation: str,
    to_start: bool,
) -> tuple[Tensor, Tensor]:
    """Few tokens, without a gradient, in one launch and without scratch. Arguments and results as in :func:`memory`,
    except that the state's weights are never differences to M_0."""
    batch, length, heads, width = q.shape
    layers, hidden = state.shape[3], state.shape[4] // width
    out, new_state = torch.empty_like(q), torch.empty_like(state)
    chosen = KERNELS["step"][width]
    with torch.cuda.device_of(q):
        decoding.step[(batch * heads,)](
            q, k, v, theta, eta, alpha, begin, begin if norm is None else norm, offset, *state, *new_state, out,
            length, heads,
            D=width, HIDDEN=hidden, SLICE=min(chosen.slice, hidden) if layers == 2 else width, LAYERS=layers,
            GATES=theta.shape[-1], CHUNK=chunk, NORM=norm is not None, RESIDUAL=residual, TO_START=to_start,
            ACTIVATION=activation, num_warps=chosen.warps, num_stages=1,
        )  # fmt: skip
    return out, new_state


@memory_step.register_fake
def _(q, k, v, theta, eta, alpha, begin, norm, state, offset, chunk, residual, activation, to_start):
    return torch.empty_like(q), torch.empty_like(state)
