"""Entry point: checks, dtypes, and the choice of an implementation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.kernels.common import no_autocast, sent, transformed, warn_once
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
    erase: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Reads and writes one matrix per head along a sequence; every token reads its own write.

        S <- diag(exp(decay_t)) S
        u  = v_t, or with the delta rule beta_t (v_t - S^T e_t): the error after the decay
        S <- S + k_t u^T
        o_t = S^T q_t

    The delta rule applies if beta or erase is given. The erased key e_t is k_t unless erase gives another.
    Without the delta rule this is linear attention (arXiv 2006.16236), RetNet (2307.08621), GLA (2312.06635), HGRN2
    (2404.07904) and Mamba2 (2405.21060). With it, it is DeltaNet (2406.06484), Gated DeltaNet (2412.06464) and KDA
    (2510.26692), and with erase Gated DeltaNet-2 (2605.22791). These models differ in how they compute q, k, v, decay,
    beta and e. Nothing is scaled or normalised here.

    A token may write several times: with n T keys, token t decays once, before the first of its n sub-steps, and reads
    after the last. DeltaProduct (2502.10297) and RWKV-7 (2503.14456) use this.

    Args:
        q: (B, T, H, K), any float dtype; queries.
        k: (B, n T, H, K); keys, n for every token.
        v: (B, n T, H, V); values.
        decay: natural logarithm of the part that remains, finite and not positive: None (everything), (H,) per head,
            (B, T, H) per token and head, or (B, T, H, K) per token and key channel.
        beta: None, or (B, n T, H), the step of the delta rule, 0 to 1 (up to 2 is stable with keys of unit length).
        erase: None, or (B, n T, H, K), the keys e whose values are erased.
        initial_state: (B, H, K, V), continue from it instead of 0. Gradients flow through it.
        output_final_state: also return the state after the last token, from which a later call continues exactly.
        reset: None or bool (B, T) on any device, True where a document starts: S = 0 there.
        backend: "naive" (definition), "chunked" (exact matrix products, any device), "fla" (flash-linear-attention's
            kernels, on a GPU), "auto": fla on a GPU where it serves, else chunked (a warning, once, says why).

    Returns:
        (B, T, H, V) in q's dtype, and the final state (B, H, K, V) or None. State and arithmetic are fp32, fp64 for
        fp64 inputs; "fla" multiplies matrices in q's dtype, accumulating in fp32.

    Raises:
        ValueError: shapes or a backend that do not fit, or backend="fla" for a call that it does not support.
    """
    _check(q, k, v, decay, beta, erase, initial_state, reset, backend)
    dtype = state_dtype(q)
    batch, length, heads, width = q.shape
    steps = k.shape[1] // length
    with no_autocast(q):
        state = q.new_zeros(batch, heads, width, v.shape[-1], dtype=dtype) if initial_state is None else initial_state
        state = state.to(dtype)
        fla = _takes_fla(q, v, decay, beta, erase, backend)
        decay, beta, erase = (None if g is None else g.to(dtype) for g in (decay, beta, erase))
        if decay is not None and decay.dim() == 1 and not (fla and steps == 1):
            decay = decay.expand(batch, length, heads)
        read = q
        if steps > 1:
            read, decay, reset = _at_substeps(steps, q, decay, reset)
        if fla:
            out, state = fla_linear_memory(read, k, v, decay, beta, erase, state, reset)
        else:
            # For one token the definition needs fewer operators than the chunked form.
            implementation = naive_linear_memory if backend == "naive" or length == 1 else chunked_linear_memory
            read, k, v = (x.to(dtype) for x in (read, k, v))
            reset = None if reset is None else sent(reset, q.device)
            out, state = implementation(read, k, v, decay, beta, erase, state, reset)
    return out[:, steps - 1 :: steps].to(q.dtype), state if output_final_state else None


def _at_substeps(
    n: int, q: Tensor, decay: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(B, T, ...) -> (B, n T, ...): decay and reset at a token's first sub-step, q at its last, else 0."""

    def placed(x: Tensor, before: int) -> Tensor:
        around = (0, 0) * (x.dim() - 2) + (before, n - 1 - before)
        return F.pad(x.unsqueeze(2), around).flatten(1, 2)

    decay, reset = (None if x is None else placed(x, 0) for x in (decay, reset))
    return placed(q, n - 1), decay, reset


def unserved(
    dtype: torch.dtype, heads: int, keys: int, values: int, decay: str | None, delta: bool, erase: bool = False
) -> str | None:
    """Reason why flash-linear-attention's kernels would not serve inputs of ``dtype`` on a GPU; None if they would.

    Args:
        heads, keys, values: the sizes H, K, V.
        decay: None, or its shape: "head" (H,), "token" (B, T, H), "channel" (B, T, H, K).
        delta: whether there is a beta.
        erase: whether erase keys are given.
    """
    shapes = {"head": (heads,), "token": (1, 1, heads), "channel": (1, 1, heads, keys)}
    with torch.device("meta"):
        q, v = (torch.empty(1, 1, heads, width, dtype=dtype) for width in (keys, values))
        gate = torch.empty(shapes[decay]) if decay else None
        return unsupported(q, v, gate, torch.empty(1, 1, heads) if delta else None, q if erase else None)


def _takes_fla(
    q: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, erase: Tensor | None, backend: str
) -> bool:
    """Whether flash-linear-attention's kernels are to be used.

    Raises:
        ValueError: backend is "fla", which does not serve this call.
    """
    if backend not in ("auto", "fla") or (backend == "auto" and q.device.type not in GPU):
        return False
    reason = transformed() or unsupported(q, v, decay, beta, erase)
    if reason is None:
        return True
    if backend == "fla":
        raise ValueError(f'linear_memory: backend "fla" does not serve this: {reason}; use "auto" or "chunked"')
    warn_once(f"linear_memory: flash-linear-attention does not serve this, PyTorch operators do (slower): {reason}")
    return False


def _check(q, k, v, decay, beta, erase, initial_state, reset, backend):
    def need(ok: bool, message: str):
        if not ok:
            raise ValueError(f"linear_memory: {message}")

    need(
        q.dim() == k.dim() == 4
        and q.shape[1] > 0
        and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
        and k.shape[1] >= q.shape[1]
        and k.shape[1] % q.shape[1] == 0,
        "q must be (B, T, H, K) with T > 0, k the same or with n keys for every token (B, n T, H, K), "
        f"got {[tuple(x.shape) for x in (q, k)]}",
    )
    batch, length, heads, width = q.shape
    token, write = (batch, length, heads), (batch, k.shape[1], heads)

    def fits(name: str, x: Tensor | None, *shapes: tuple):
        if x is not None and tuple(x.shape) not in shapes:
            need(False, f"{name} must be {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")

    fits("v", v, (*write, v.shape[-1]))
    fits("decay", decay, (heads,), token, (*token, width))
    fits("beta", beta, write)
    fits("erase", erase, (*write, width))
    fits("initial_state", initial_state, (batch, heads, width, v.shape[-1]))
    need(reset is None or (reset.dtype == torch.bool and reset.shape == q.shape[:2]), "reset must be bool (B, T)")
    need(backend in BACKENDS, f"backend {backend!r} is none of {', '.join(BACKENDS)}")
