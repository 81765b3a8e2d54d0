"""Entry point of the memory: checks, dtypes, choice of an implementation."""

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from titans_pt.kernels.common import no_autocast, refuse_export, transformed, warn_once
from titans_pt.kernels.memory import mlp
from titans_pt.kernels.memory.blockwise import BLOCKWISE, NATIVE_BLOCKS
from titans_pt.kernels.memory.call import Author, Backend, MemoryCall, rule_alone, wrong
from titans_pt.kernels.memory.chunked import CHUNKED, NATIVE
from titans_pt.kernels.memory.naive import NAIVE
from titans_pt.kernels.memory.native.token import TOKEN
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import TITANS, Own, Rule
from titans_pt.kernels.memory.soup import Soup
from titans_pt.kernels.memory.state import MemoryState, Weights

BACKENDS = ("auto", "triton", "native", "chunked", "naive")
HAS_TRITON = find_spec("triton") is not None
GPU = ("cuda", "meta")
"""Meta tensors follow the GPU path, which lets the planner measure its allocations."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels, on CPU tensors; Triton decides this when it is imported."""


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
    rule: Rule = TITANS,
    own: Own = (),
    soup: Soup | None = None,
) -> tuple[Tensor, MemoryState | None]:
    """Reads and writes the long-term memory along a sequence; every token reads its own write (y_t = M_t(q_t)).

    Args:
        q, k, v: (B, T, H, D), any float dtype; queries, keys (unit length expected) and values.
        theta, eta, alpha: step size, momentum, forgetting, (B, T, H), or (B, T, H, L) for one per memory layer. alpha
            may also have one per channel, (B, T, H, network.channels): layer by layer, one for each of the d_in rows of
            the layer's matrix.
        weights: L tensors (H, d_in, d_out): M_0, with which documents begin. Layers compute x @ W. The first d_in is
            rule.width(D), D for most rules; the last d_out is D.
        network: shape, activation and residual of M. None: derived from weights and norm, with the residual and GELU.
        norm: (weight, bias), each (H, D), of the network's LayerNorm; None for a network without it.
        chunk_size: C; the gradient of a token is taken at the weights of its chunk's start.
        forget_to: where alpha pulls the memory. "zero": M_t = (1 - alpha_t) M_{t-1} + S_t, the paper's; "start":
            M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t. Under a LayerNorm small weights make large steps:
            forgetting to zero can end in a memory that neither learns nor can be trained through.
        initial_state: continue from it instead of M_0, S_0 = 0. Gradients flow through it. With forget_to="start" pass
            the same ``weights`` in each call of a stream: they remain M_0.
        output_final_state: also return the state after the last token.
        reset: None or bool (B, T) on any device, True where a document starts: M_0, S_0 = 0, chunks count from there.
        max_resets: upper bound on the resets in a row of ``reset``; None: unknown. With it "triton" does not wait for
            the GPU to count them. Too large a bound costs scratch memory, too small a bound gives wrong results.
        backend: "naive" (definition), "chunked" (exact dual form, any rule), "native" (the same in C, on a CPU),
            "triton" (fused kernels, on a GPU), "auto": on a GPU triton if it serves the call (else one warning says why
            not), on a CPU native if it serves the call, else chunked.
        save_every: number of blocks between two states kept for the backward pass, which recomputes the states in
            between. None: at most the square root of the number of blocks, fewer where memory allows; triton: as many
            as kernels.memory.fused.operators.SCRATCH_BYTES holds.
        stale: tokens read the memory as it was at the start of their chunk, and nothing of the chunk itself. Meant for
            large chunks: each takes a few matrix products, by PyTorch's operators on any device.
        rule: the inner loss and the update. "triton" serves only Titans' own, the default; "native" most rules with a
            Rule.compiled_loss (its error says why not).
        own: the rule's own gates in its order, each (B, T, H).
        soup: other memories that every token reads together with the running one, by PyTorch's operators.

    Returns:
        (B, T, H, D) in q's dtype, and the final state or None. State and arithmetic are fp32, fp64 for fp64 inputs;
        "triton" multiplies matrices in q's dtype, accumulating in fp32.

    Raises:
        ValueError: shapes, network or backend that do not fit, or a backend that does not serve this.
    """
    with no_autocast(q):
        call = MemoryCall.given(
            q, k, v, theta, eta, alpha, weights, network, norm, rule, own, chunk_size=chunk_size,
            forget_to=forget_to, initial_state=initial_state, reset=reset, max_resets=max_resets, save_every=save_every,
            stale=stale, soup=soup,
        )  # fmt: skip
        return _served(call, output_final_state, backend)


def self_modifying_memory(
    q: Tensor,
    author: Author,
    weights: Weights,
    *,
    network: NetworkShape | None = None,
    norm: Weights | None = None,
    chunk_size: int = 16,
    forget_to: str = "zero",
    initial_state: MemoryState | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
    save_every: int | None = None,
    rule: Rule = TITANS,
) -> tuple[Tensor, MemoryState | None]:
    """Memory whose keys, values and gates are made from its own answers (Nested Learning, arXiv 2512.24695, Eq. 86-91).

    A whole chunk is read at the weights of its start: the outputs y_t = M(q_t) and all further reads of ``author``.
    Then the chunk's tokens write, and the next chunk begins.

    Args:
        q: (B, T, H, D), any float dtype.
        author: (answers, read) -> k, v, theta, eta, alpha, own gates of a block of c tokens. answers: y of the block,
            (B, H, c, D). read: further queries (B, H, c, D) to the same memory -> its answers. The author returns k and
            v (B, H, c, D), theta, eta, alpha (B, H, c, 1 or L), one alpha for a matrix, and the rule's own gates
            (B, H, c, 1), all in the dtype of states. Gradients flow through the author; the inner gradient treats v as
            a constant.
        backend: "naive" (definition), "chunked" (exact, any rule), "native" (writes in C, on a CPU), "auto": native
            where it serves, else chunked.

    All other arguments, results and errors are those of :func:`neural_memory`.
    """
    with no_autocast(q):
        call = MemoryCall.authored(
            q, author, weights, network, norm, rule, chunk_size=chunk_size, forget_to=forget_to,
            initial_state=initial_state, reset=reset, save_every=save_every,
        )  # fmt: skip
        return _served(call, output_final_state, backend)


def _served(call: MemoryCall, output_final_state: bool, backend: str) -> tuple[Tensor, MemoryState | None]:
    """Checks a call and runs it by the implementation that serves it."""
    if torch.jit.is_tracing():
        refuse_export("a memory")
    call.check()
    if torch.compiler.is_compiling() and _breaks_the_graph(call, backend):
        refuse_export("a memory")
        # Not at the top: importing torch's compiler takes seconds, which only a call that is compiled should cost.
        from titans_pt.kernels.memory import uncompiled

        out, state = uncompiled.run(_run, call, backend)
    else:
        out, state = _run(call, backend)
    return out.to(call.q.dtype), state if output_final_state else None


def _run(call: MemoryCall, backend: str) -> tuple[Tensor, MemoryState]:
    return chosen(call, backend).run(call)


def _breaks_the_graph(call: MemoryCall, backend: str) -> bool:
    """Whether a compiled call runs outside the graph. On a CPU the choice itself must: it looks for compiled C on disk,
    which cannot be traced."""
    if backend == "auto" and call.q.device.type not in GPU:
        return True
    serves = chosen(call, backend)
    return serves is not TRITON and (backend == "auto" or serves is BLOCKWISE)


def chosen(call: MemoryCall, backend: str) -> Backend:
    """The implementation that serves a call.

    Raises:
        ValueError: there is no such backend, or it does not serve this call.
    """
    if backend not in BACKENDS:
        wrong(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend != "auto":
        names: tuple[str, ...] = (backend,)
    elif (call.reads_start or call.soup) and call.q.device.type in GPU:
        names = ("chunked",)
    else:
        names = ("triton" if call.q.device.type in GPU else "native", "chunked")
    reason = None
    for name in names:
        for each in _NAMED[name]:
            if (reason := each.serves(call)) is None:
                return each
        if backend == "auto" and name == "triton":
            warn_once(f"neural_memory: the fused kernels do not serve this, PyTorch operators do (slower): {reason}")
    others = '"naive"' if backend in ("auto", "chunked") else '"auto" or "chunked"'
    raise ValueError(f'neural_memory: backend "{backend}" does not serve this: {reason}; use {others}')


def _triton_serves(call: MemoryCall) -> str | None:
    if call.q.device.type not in GPU and not INTERPRETED:
        return (
            f"tensors are on {call.q.device.type}, not on a GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
        )
    if call.soup:
        return rule_alone(call.rule, soup=True)
    if reason := transformed():
        return reason
    return unserved(call.q.dtype, call.network, call.chunk_size, call.channelwise, call.q.device, call.rule, call.stale)


def _run_triton(call: MemoryCall) -> tuple[Tensor, MemoryState]:
    # Not at the top: it imports triton, which machines without a GPU need not have.
    from titans_pt.kernels.memory.fused import fused_memory

    return fused_memory(call)


TRITON = Backend(_triton_serves, _run_triton)
_NAMED = {
    "triton": (TRITON,),
    "native": (TOKEN, NATIVE_BLOCKS, NATIVE),
    "chunked": (CHUNKED, BLOCKWISE),
    "naive": (NAIVE,),
}
"""Implementations of each backend; the first one that serves a call runs it."""


def unserved(
    dtype: torch.dtype,
    network: NetworkShape,
    chunk_size: int,
    channelwise: bool = False,
    device: torch.device | None = None,
    rule: Rule = TITANS,
    stale: bool = False,
) -> str | None:
    """Reason why the fused kernels would not serve inputs of ``dtype`` on a GPU; None if they would.

    channelwise: whether alpha has one value per channel. device: which GPU; None for a Hopper one.
    """
    if reason := rule_alone(rule, channelwise, stale):
        return reason
    if not HAS_TRITON:
        return "triton is not installed"
    # Not at the top: it imports triton, which machines without a GPU need not have.
    from titans_pt.kernels.memory.fused.configurations import SHARED, UNSOUND, unsupported

    if device is not None and device.type not in GPU:
        return unsupported(dtype, network, chunk_size, sys.maxsize)  # Triton's interpreter has no such limit
    shared = SHARED
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        if UNSOUND:
            return UNSOUND
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED)
    return unsupported(dtype, network, chunk_size, shared)


def memory_read(
    q: Tensor,
    weights: Weights,
    *,
    network: NetworkShape | None = None,
    norm: Weights | None = None,
    rule: Rule = TITANS,
) -> Tensor:
    """M(q) without writing: q (B, T, H, D), weights (B, H, d_in, d_out) of a state, norm (H, D) -> (B, T, H, D)."""
    dtype = weights[0].dtype
    network = network or NetworkShape.of(weights, norm)
    with no_autocast(q):
        affine = None if norm is None else tuple(p.to(dtype).unsqueeze(-2) for p in norm)
        x = q.to(dtype).transpose(1, 2)
        out = mlp.forward(x, weights, affine, network, rule.features(x))
    return out.transpose(1, 2).to(q.dtype)
