"""The one entry: checks, dtypes, the choice of an implementation."""

import torch
from torch import Tensor

from titans_pt.kernels.common import no_autocast, warn_once
from titans_pt.kernels.linear_memory.chunked import chunked_linear_memory
from titans_pt.kernels.linear_memory.fla import fla_linear_memory, unsupported
from titans_pt.kernels.linear_memory.naive import naive_linear_memory
from titans_pt.kernels.memory.dispatch import GPU
from titans_pt.kernels.memory.state import state_dtype

BACKENDS = ("auto", "fla", "chunked", "naive")


def linear_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Reads and writes one matrix per head along a sequence; every token reads its own write.

        S <- diag(exp(decay_t)) S
        u  = v_t, or beta_t (v_t - S^T k_t) with beta: the error after the decay
        S <- S + k_t u^T
        o_t = S^T q_t

    Without beta this is linear attention (arXiv 2006.16236), RetNet (2307.08621), GLA (2312.06635), HGRN2 (2404.07904)
    and Mamba2 (2405.21060), with beta DeltaNet (2406.06484), Gated DeltaNet (2412.06464) and KDA (2510.26692): they
    differ in what they call q, k, v, decay and beta. Nothing is scaled or normalised here.

    Args:
        q, k: (B, T, H, K), any float dtype; queries and keys.
        v: (B, T, H, V); values.
        decay: natural logarithm of what remains, not positive and finite: None (everything), (H,) per head,
            (B, T, H) per token and head, or (B, T, H, K) per token and key channel.
        beta: None, or (B, T, H), the step of the delta rule, 0 to 1 (up to 2 is stable with keys of unit length).
        initial_state: (B, H, K, V), continue from it instead of 0. Gradients flow through it.
        output_final_state: also return the state after the last token. It makes a cut at any token invisible.
        reset: None or bool (B, T), True where a document starts: S = 0 there.
        backend: "naive" (definition), "chunked" (exact matrix products, any device), "fla" (flash-linear-attention's
            kernels, on a GPU), "auto": fla on a GPU where it serves, else chunked (a warning, once, says why).

    Returns:
        (B, T, H, V) in q's dtype, and the final state (B, H, K, V) or None. State and arithmetic are fp32, fp64 for
        fp64 inputs; "fla" multiplies matrices in q's dtype, accumulating in fp32.

    Raises:
        ValueError: shapes or a backend that do not fit, or backend="fla" for what it does not serve.
    """
    _check(q, k, v, decay, beta, initial_state, reset, backend)
    dtype = state_dtype(q)
    batch, length, heads, width = q.shape
    with no_autocast(q):
        state = q.new_zeros(batch, heads, width, v.shape[-1], dtype=dtype) if initial_state is None else initial_state
        gates = [None if g is None else g.to(dtype) for g in (decay, beta)]
        if _takes_fla(q, v, decay, beta, backend):
            out, state = fla_linear_memory(q, k, v, *gates, state.to(dtype), reset)
        else:
            if decay is not None and decay.dim() == 1:
                gates[0] = gates[0].expand(batch, length, heads)
            # One token is no chunk: the definition has fewer operators.
            implementation = naive_linear_memory if backend == "naive" or length == 1 else chunked_linear_memory
            out, state = implementation(*(x.to(dtype) for x in (q, k, v)), *gates, state.to(dtype), reset)
    return out.to(q.dtype), state if output_final_state else None


def unserved(dtype: torch.dtype, heads: int, keys: int, values: int, decay: str | None, delta: bool) -> str | None:
    """Why flash-linear-attention's kernels would not serve inputs of ``dtype`` on a GPU; None if they would.

    Args:
        heads, keys, values: the sizes H, K, V.
        decay: None, or what has one of its own: "head", "token", "channel" (key channels, at every token).
        delta: whether there is a beta.
    """
    shapes = {"head": (heads,), "token": (1, 1, heads), "channel": (1, 1, heads, keys)}
    with torch.device("meta"):
        q, v = (torch.empty(1, 1, heads, width, dtype=dtype) for width in (keys, values))
        gate = torch.empty(shapes[decay]) if decay else None
        return unsupported(q, v, gate, torch.empty(1, 1, heads) if delta else None)


def _takes_fla(q: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, backend: str) -> bool:
    """Whether flash-linear-attention's kernels are to be used.

    Raises:
        ValueError: backend is "fla", which does not serve this call.
    """
    if backend not in ("auto", "fla") or (backend == "auto" and q.device.type not in GPU):
        return False
    reason = unsupported(q, v, decay, beta)
    if reason is None:
        return True
    if backend == "fla":
        raise ValueError(f'linear_memory: backend "fla" does not serve this: {reason}; use "auto" or "chunked"')
    warn_once(f"linear_memory: flash-linear-attention does not serve this, PyTorch operators do (slower): {reason}")
    return False


def _check(q, k, v, decay, beta, initial_state, reset, backend):
    def need(ok: bool, message: str):
        if not ok:
            raise ValueError(f"linear_memory: {message}")

    need(
        q.dim() == 4 and q.shape == k.shape and q.shape[1] > 0,
        f"q, k must share one shape (B, T, H, K) with T > 0, got {[tuple(x.shape) for x in (q, k)]}",
    )
    batch, length, heads, width = q.shape
    token = (batch, length, heads)

    def fits(name: str, x: Tensor | None, *shapes: tuple):
        need(
            x is None or tuple(x.shape) in shapes,
            f"{name} must be {' or '.join(map(str, shapes))}, got {x is not None and tuple(x.shape)}",
        )

    fits("v", v, (*token, v.shape[-1]))
    fits("decay", decay, (heads,), token, (*token, width))
    fits("beta", beta, token)
    fits("initial_state", initial_state, (batch, heads, width, v.shape[-1]))
    need(reset is None or (reset.dtype == torch.bool and reset.shape == q.shape[:2]), "reset must be bool (B, T)")
    need(backend in BACKENDS, f"backend {backend!r} is none of {', '.join(BACKENDS)}")
