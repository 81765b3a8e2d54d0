"""Entry point: checks, dtypes, and the choice of an implementation."""

import torch
from torch import Tensor

from titans_pt.kernels.channel_scan import native
from titans_pt.kernels.channel_scan.loop import loop_scan
from titans_pt.kernels.common import no_autocast, sent, transformed, warn_once
from titans_pt.kernels.memory.dispatch import GPU, HAS_TRITON, INTERPRETED
from titans_pt.kernels.memory.state import state_dtype

BACKENDS = ("auto", "triton", "native", "loop")


def channel_scan(
    x: Tensor,
    step: Tensor,
    k: Tensor,
    q: Tensor,
    rate: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the selective scan of Mamba and Longhorn, with a state h_c of N entries per channel c.

    Each token reads its own write:

        h_cn <- a_cn h_cn + step_c x_c k_n        y_c = sum_n q_n h_cn

        a_cn = exp(-rate_cn step_c)               Mamba (arXiv 2312.00752, Eq. 2 to 4): k = B, q = C, rate = exp(A_log)
        a_cn = 1 - step_c k_n^2                   Longhorn (arXiv 2407.14207) without a rate: step_c k'k < 1

    This equals :func:`titans_pt.kernels.linear_memory.linear_memory` with one head per channel and V = 1: log decay
    log(a), values step x, k and q shared by all heads. Skip connection and gate are left to the caller.

    Args:
        x: (B, T, D), any float dtype; inputs of D channels.
        step: (B, T, D), not negative; Mamba's delta, Longhorn's beta / (1 + beta k'k).
        k, q: (B, T, N); how inputs enter the N entries of a state, how outputs are read from them.
        rate: (D, N), not negative, or None for Longhorn's decay.
        initial_state: (B, D, N), continue from it instead of 0. Gradients flow through it.
        output_final_state: also return the state after the last token, from which a later call continues exactly.
        reset: None or bool (B, T) on any device, True where a document starts: h = 0 there.
        backend: "loop" (definition, token by token in PyTorch), "native" (in C, on a CPU), "triton" (fused kernels, on
            a GPU), "auto": triton on a GPU if it can (else one warning gives the reason), native on a CPU if it can,
            else loop.

    Returns:
        (B, T, D) in x's dtype, and the final state (B, D, N) or None. State and arithmetic are fp32, fp64 for fp64
        inputs.

    Raises:
        ValueError: shapes or a backend that do not fit, or backend="triton" for a call that it does not support.
    """
    _check(x, step, k, q, rate, initial_state, reset, backend)
    dtype = state_dtype(x)
    with no_autocast(x):
        shape = x.shape[0], x.shape[2], k.shape[2]
        state = x.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        rate = None if rate is None else rate.to(dtype)
        if (fused := _fused(x, k, backend)) is not None:
            out, state = fused(x, step, k, q, rate, state, reset)
        else:
            call = loop_scan if backend == "loop" else native.cpu_scan
            if backend == "native" and (reason := native.unserved(state)) is not None:
                raise ValueError(f'channel_scan: backend "native" does not serve this: {reason}; use "auto" or "loop"')
            if backend == "auto" and torch.compiler.is_compiling():
                # Not at the top: it imports torch's compiler, which takes seconds.
                from titans_pt.kernels.channel_scan.uncompiled import call
            reset = None if reset is None else sent(reset, x.device)
            out, state = call(x.to(dtype), step.to(dtype), k.to(dtype), q.to(dtype), rate, state, reset)
    return out.to(x.dtype), state if output_final_state else None


def unserved(dtype: torch.dtype, states: int) -> str | None:
    """Reason why the fused kernels would not serve inputs of ``dtype`` with N = ``states`` on a GPU, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    # Not at the top: it imports triton, which machines without a GPU need not have.
    from titans_pt.kernels.channel_scan.fused import unsupported

    return unsupported(*(torch.empty(1, 1, n, dtype=dtype, device="meta") for n in (1, states)))


def _fused(x: Tensor, k: Tensor, backend: str):
    """The fused implementation if this call uses it, else None.

    Raises:
        ValueError: backend is "triton", which does not serve this call.
    """
    if backend not in ("auto", "triton") or (backend == "auto" and x.device.type not in GPU):
        return None
    reason: str | None
    if not HAS_TRITON:
        reason = "triton is not installed"
    elif x.device.type not in GPU and not INTERPRETED:
        reason = f"tensors are on {x.device.type}, not on a GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    else:
        # Not at the top: it imports triton, which machines without a GPU need not have.
        from titans_pt.kernels.channel_scan.fused import fused_scan, unsupported

        reason = transformed() or unsupported(x, k)
        if reason is None:
            return fused_scan
    if backend == "triton":
        raise ValueError(f'channel_scan: backend "triton" does not serve this: {reason}; use "auto" or "loop"')
    warn_once(f"channel_scan: the fused kernels do not serve this, PyTorch operators do (slower): {reason}")
    return None


def _check(x, step, k, q, rate, initial_state, reset, backend):
    def need(ok: bool, message: str):
        if not ok:
            raise ValueError(f"channel_scan: {message}")

    need(
        x.dim() == 3 and x.shape == step.shape and x.shape[1] > 0,
        f"x, step must share one shape (B, T, D) with T > 0, got {[tuple(t.shape) for t in (x, step)]}",
    )
    batch, length, channels = x.shape
    need(
        k.dim() == 3 and k.shape == q.shape and k.shape[:2] == x.shape[:2],
        f"k, q must share one shape {(batch, length, 'N')}, got {[tuple(t.shape) for t in (k, q)]}",
    )
    size = k.shape[2]
    need(
        rate is None or rate.shape == (channels, size),
        f"rate must be {(channels, size)}, got {rate is not None and tuple(rate.shape)}",
    )
    need(
        initial_state is None or initial_state.shape == (batch, channels, size),
        f"initial_state must be {(batch, channels, size)}, "
        f"got {initial_state is not None and tuple(initial_state.shape)}",
    )
    need(reset is None or (reset.dtype == torch.bool and reset.shape == x.shape[:2]), "reset must be bool (B, T)")
    need(backend in BACKENDS, f"backend {backend!r} is none of {', '.join(BACKENDS)}")
