"""The one entry: checks, dtypes, the choice of an implementation."""

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from titans_pt.kernels.common import no_autocast, warn_once
from titans_pt.kernels.memory import mlp, native
from titans_pt.kernels.memory.channelwise import channelwise_memory
from titans_pt.kernels.memory.chunked import chunked_memory
from titans_pt.kernels.memory.naive import naive_memory
from titans_pt.kernels.memory.native import token
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.stale import stale_memory
from titans_pt.kernels.memory.state import MemoryState, Weights, state_dtype

FORGET_TO = ("start", "zero")
CHANNELWISE = "alpha has one value per channel (model.memory.alpha=channel); alpha=head is served"
"""Why neither the fused kernels nor those in C take a call."""
BACKENDS = ("auto", "triton", "native", "chunked", "naive")
HAS_TRITON = find_spec("triton") is not None
GPU = ("cuda", "meta")
"""Tensors without contents take a GPU's ways, so that anybody can ask what these would allocate."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels, on tensors of the CPU: it decides that when it is imported."""


def neural_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    weights: Weights,
    *,
    network: NetworkShape | None = None,
    norm: Weights | None = None,
    chunk_size: int = 16,
    forget_to: str = "zero",
    initial_state: MemoryState | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    max_resets: int | None = None,
    backend: str = "auto",
    save_every: int | None = None,
    stale: bool = False,
) -> tuple[Tensor, MemoryState | None]:
    """Reads and writes the long-term memory along a sequence; every token reads its own write (y_t = M_t(q_t)).

    Args:
        q, k, v: (B, T, H, D), any float dtype; queries, keys (unit length expected) and values.
        theta, eta, alpha: step size, momentum, forgetting, (B, T, H), or (B, T, H, L) for one per memory layer. alpha
            may also have one per channel, (B, T, H, network.channels): of each layer, in order, one for each of the
            d_in rows of its matrix.
        weights: L tensors (H, d_in, d_out), M_0, where documents begin; the first d_in and the last d_out are D. x @ W.
        network: what M is. None: what weights and norm say, with the residual and GELU.
        norm: (weight, bias), each (H, D), of the network's LayerNorm; None for a network without it.
        chunk_size: C; the gradient of a token is taken at the weights of its chunk's start.
        forget_to: where alpha pulls the memory. "zero": M_t = (1 - alpha_t) M_{t-1} + S_t, the paper's; "start":
            M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t. Under a LayerNorm small weights make large steps, so
            forgetting to zero can end in a memory that neither learns nor can be trained through.
        initial_state: continue from it instead of M_0, S_0 = 0. Gradients flow through it. With forget_to="start"
            give the same ``weights`` in each call of a stream: they are M_0 still.
        output_final_state: also return the state after the last token.
        reset: None or bool (B, T), True where a document starts: M_0, S_0 = 0, chunks count from there.
        max_resets: no row of ``reset`` has more; None: unknown. With it, "triton" does not wait for the GPU to count
            them. More than there are cost scratch memory, fewer give wrong results.
        backend: "naive" (definition), "chunked" (exact dual form), "native" (the same in C, on a CPU), "triton" (fused
            kernels, on a GPU), "auto": triton on a GPU where it serves (a warning, once, says why it does not), native
            on a CPU where it does, else chunked.
        save_every: blocks between two states kept for the backward pass, which computes those between again.
            None: at most the square root of the number of blocks, fewer where memory allows; triton: as many as
            kernels.memory.fused.operators.SCRATCH_BYTES holds.
        stale: tokens read the memory as it was at the start of their chunk, and nothing of the chunk itself. For large
            chunks: a few matrix products each (stale.py), by PyTorch's operators on any device.

    Returns:
        (B, T, H, D) in q's dtype, and the final state or None. State and arithmetic are fp32, fp64 for fp64 inputs;
        "triton" multiplies matrices in q's dtype, accumulating in fp32.

    Raises:
        ValueError: shapes, network or backend that do not fit, or a backend that does not serve this.
    """
    network = network or NetworkShape.of(weights, norm)
    _check(q, k, v, theta, eta, alpha, weights, network, norm, chunk_size, forget_to, initial_state, reset, backend)
    dtype = state_dtype(q)
    channelwise = alpha.dim() == 4 and alpha.shape != theta.shape
    if stale and (channelwise or backend in ("triton", "native")):
        _wrong(
            f"stale: given with {'an alpha for each channel' if channelwise else f'backend {backend!r}'}; PyTorch's "
            "operators alone serve it, with alpha=head"
        )
    plain = channelwise or stale
    fused = None if stale else _fused(q, network, chunk_size, channelwise, backend)
    with no_autocast(q):
        gates = [g.to(dtype) if g.dim() == 4 else g.to(dtype).unsqueeze(-1) for g in (theta, eta, alpha)]
        if fused is not None:
            out, state = fused(
                q, k, v, *gates, weights, network=network, norm=norm, chunk_size=chunk_size, forget_to=forget_to,
                initial_state=initial_state, reset=reset, max_resets=max_resets, save_every=save_every,
            )  # fmt: skip
            return out, state if output_final_state else None
        inputs = [x.to(dtype) for x in (q, k, v)]
        if not plain and backend in ("auto", "native") and token.serves(inputs[0], network, initial_state, reset):
            affine = None if norm is None else tuple(p.to(dtype) for p in norm)
            begin = tuple(w.to(dtype) for w in weights)
            out, state = token.next_token(
                *inputs, tuple(gates), begin, initial_state, network=network, norm=affine, chunk_size=chunk_size,
                to_start=forget_to == "start",
            )  # fmt: skip
            return out.to(q.dtype), state if output_final_state else None
        batch = q.shape[0]
        start = tuple(w.to(dtype).expand(batch, *w.shape) for w in weights)
        options = {
            "network": network,
            "norm": None if norm is None else tuple(p.to(dtype).expand(batch, *p.shape) for p in norm),
            "chunk_size": chunk_size,
            "forget_to": forget_to,
            "state": initial_state or MemoryState.initial(weights, batch, dtype),
            "reset": reset,
        }
        if backend == "naive":
            out, state = naive_memory(*inputs, *gates, start, stale=stale, **options)
        else:
            reason = None
            if backend == "native":
                reason = CHANNELWISE if channelwise else native.unserved(inputs[0], network)
            if reason is not None:
                _wrong(f'backend "native" does not serve this: {reason}; use "auto" or "chunked"')
            call, options["save_every"] = stale_memory if stale else channelwise_memory, save_every
            if not plain:
                call, options["in_c"] = chunked_memory, backend != "chunked"
            if torch.compiler.is_compiling() and (backend == "auto" or plain):
                # Not at the top: it imports torch's compiler, seconds that whoever does not compile need not wait.
                from titans_pt.kernels.memory import uncompiled

                call = uncompiled.stale if stale else uncompiled.channelwise if channelwise else uncompiled.chunked
            out, state = call(*inputs, *gates, start, **options)
    return out.to(q.dtype), state if output_final_state else None


def _fused(q: Tensor, network: NetworkShape, chunk_size: int, channelwise: bool, backend: str):
    """The fused implementation if it is to be used, else None.

    Raises:
        ValueError: backend is "triton", which does not serve this call.
    """
    if backend not in ("auto", "triton") or (backend == "auto" and q.device.type not in GPU):
        return None
    if q.device.type not in GPU and not INTERPRETED:
        reason = f"tensors are on {q.device.type}, not on a GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    else:
        reason = unserved(q.dtype, network, chunk_size, channelwise, q.device)
        if reason is None:
            from titans_pt.kernels.memory.fused import fused_memory

            return fused_memory
    if backend == "triton":
        _wrong(f'backend "triton" does not serve this: {reason}; use "auto" or "chunked"')
    warn_once(f"neural_memory: the fused kernels do not serve this, PyTorch operators do (slower): {reason}")
    return None


def unserved(
    dtype: torch.dtype,
    network: NetworkShape,
    chunk_size: int,
    channelwise: bool = False,
    device: torch.device | None = None,
) -> str | None:
    """Why the fused kernels would not serve inputs of ``dtype`` on a GPU; None if they would.

    channelwise: whether alpha has one value per channel. device: which GPU; None for a Hopper one.
    """
    if channelwise:
        return CHANNELWISE
    if not HAS_TRITON:
        return "triton is not installed"
    # Not at the top: it imports triton, which machines without a GPU need not have.
    from titans_pt.kernels.memory.fused.configurations import SHARED, unsupported

    if device is not None and device.type not in GPU:
        return unsupported(dtype, network, chunk_size, sys.maxsize)  # Triton's interpreter has no such limit
    shared = SHARED
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED)
    return unsupported(dtype, network, chunk_size, shared)


def memory_read(
    q: Tensor, weights: Weights, *, network: NetworkShape | None = None, norm: Weights | None = None
) -> Tensor:
    """M(q) without writing: q (B, T, H, D), weights (B, H, d_in, d_out) of a state, norm (H, D) -> (B, T, H, D)."""
    dtype = weights[0].dtype
    network = network or NetworkShape.of(weights, norm)
    with no_autocast(q):
        affine = None if norm is None else tuple(p.to(dtype).unsqueeze(-2) for p in norm)
        out = mlp.forward(q.to(dtype).transpose(1, 2), weights, affine, network)
    return out.transpose(1, 2).to(q.dtype)


def _wrong(message: str):
    raise ValueError(f"neural_memory: {message}")


def _check(q, k, v, theta, eta, alpha, weights, network, norm, chunk_size, forget_to, initial_state, reset, backend):
    """A message is put together only where something is wrong: generation asks for every token."""
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape or not q.numel():
        _wrong(f"q, k, v must share one shape (B, T, H, D) without zeros, got {[tuple(x.shape) for x in (q, k, v)]}")
    batch, length, heads, width = q.shape
    shapes = ((batch, length, heads), (batch, length, heads, 1), (batch, length, heads, len(weights)))
    channels = (batch, length, heads, network.channels)
    if theta.shape != eta.shape or theta.shape not in shapes or alpha.shape not in (theta.shape, channels):
        _wrong(
            f"theta, eta, alpha must share one of the shapes {shapes}, or alpha have {channels}, "
            f"got {[tuple(g.shape) for g in (theta, eta, alpha)]}"
        )
    ends = [width, *(w.shape[2] for w in weights)]
    if ends[-1] != width or any(w.shape[:2] != (heads, d) for w, d in zip(weights, ends[:-1], strict=True)):
        _wrong(
            f"weights must chain (H, d_in, d_out) from D to D with H={heads}, D={width}, "
            f"got {[tuple(w.shape) for w in weights]}"
        )
    if norm is not None and any(p.shape != (heads, width) for p in norm):
        _wrong(f"norm must be two ({heads}, {width})")
    own = NetworkShape.of(weights, norm, network.residual, network.activation)
    if own.layers != network.layers or own.norm != network.norm:
        _wrong(f"weights and norm are those of {own}, not of {network}")
    if network.activation not in mlp.ACTIVATIONS:
        _wrong(f"activation {network.activation!r} is none of {', '.join(mlp.ACTIVATIONS)}")
    if chunk_size < 1:
        _wrong(f"chunk_size {chunk_size} must be at least 1")
    if forget_to not in FORGET_TO:
        _wrong(f"forget_to {forget_to!r} is none of {', '.join(FORGET_TO)}")
    if initial_state is not None and len(initial_state.offset) != batch:
        _wrong(f"initial_state has {len(initial_state.offset)} rows, q has {batch}")
    if reset is not None and (reset.dtype != torch.bool or reset.shape != q.shape[:2]):
        _wrong(f"reset must be bool ({batch}, {length})")
    if backend not in BACKENDS:
        _wrong(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
