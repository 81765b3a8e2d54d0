"""Entry point: checks, dtypes, and the choice of an implementation."""

import torch
from torch import Tensor

from titans_pt.kernels.common import no_autocast, refuse_export
from titans_pt.kernels.memory.state import state_dtype
from titans_pt.kernels.ttt_memory.dual import dual_ttt_memory
from titans_pt.kernels.ttt_memory.naive import naive_ttt_memory
from titans_pt.kernels.ttt_memory.state import Parameters, TTTState

BACKENDS = ("auto", "dual", "naive")


def ttt_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    tau: Tensor,
    weights: Parameters,
    biases: Parameters,
    norm: Parameters,
    *,
    initial_state: TTTState | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
    save_every: int | None = None,
) -> tuple[Tensor, TTTState | None]:
    """Run TTT-Linear or TTT-MLP (arXiv 2407.04620, Section 2): read and train a small network f per head.

        f(x; W) = x W1 + b1, or gelu(x W1 + b1) W2 + b2 (GELU in its tanh form)
        g_s = gradient of 1/2 |k_s + LN(f(k_s; W)) - v_s|^2 at the weights W of the start of s's mini-batch
        W_t = W - tau_i sum_{s <= t in the mini-batch} rate_s g_s        t being its i-th token, i = 1 .. C
        y_t = q_t + LN(f(q_t; W_t))

    The next mini-batch starts with the W_t of this one's last token. Biases are trained like weights.

    Args:
        q, k, v: (B, T, H, D), any float dtype; queries, keys and values, rotated as the caller likes.
        rate: (B, T, H), learning rate of each token's gradient, not negative.
        tau: (C,), tau_i is the factor of the sum for token i of a mini-batch, C the length of a mini-batch (the paper:
            C = 16, tau_i = max(0, 1 / i + a learned number)).
        weights: (W1,) or (W1, W2), the learned initial weights, (H, d_in, d_out) each, from D to D.
        biases: (b1,) or (b1, b2), (H, d_out) each.
        norm: (weight, bias), each (H, D), of the LayerNorm (eps 1e-6).
        initial_state: continue from it instead of the initial weights. Gradients flow through it.
        output_final_state: also return the state after the last token, from which a later call continues exactly.
        reset: None or bool (B, T) on any device, True where a document starts: weights and mini-batches begin again
            there.
        backend: "naive" (definition), "dual" (exact matrix products, any device), "auto": dual.
        save_every: mini-batches between two saved parameter sets; the backward pass recomputes those between. None: the
            square root of the number of mini-batches, which needs least memory.

    Returns:
        (B, T, H, D) in q's dtype, and the final state or None. State and arithmetic are fp32, fp64 for fp64 inputs.

    Raises:
        ValueError: shapes or a backend that do not fit.
    """
    _check(q, k, v, rate, tau, weights, biases, norm, reset, backend)
    if initial_state is not None:
        _check_state(initial_state, q, tau, weights, biases)
    dtype = state_dtype(q)
    with no_autocast(q):
        learned = [p for layer in zip(weights, biases, strict=True) for p in layer]
        # Contiguous, as later mini-batches' weights are: one compiled program serves them all.
        begin = tuple(p.to(dtype).expand(q.shape[0], *p.shape).contiguous() for p in learned)
        queries, keys, values, rate, tau = (x.to(dtype) for x in (q, k, v, rate, tau))
        norm = tuple(p.to(dtype) for p in norm)
        state = TTTState.initial(begin) if initial_state is None else initial_state.to(begin[0])
        if backend == "naive":
            out, state = naive_ttt_memory(queries, keys, values, rate, tau, begin, norm, state, reset)
        else:
            call = dual_ttt_memory
            if backend == "auto" and torch.compiler.is_compiling():
                refuse_export("a TTT memory")
                # Not at the top: it imports torch's compiler, which takes seconds.
                from titans_pt.kernels.ttt_memory.uncompiled import looped_ttt_memory as call
            out, state = call(queries, keys, values, rate, tau, begin, norm, state, reset, save_every)
    return out.to(q.dtype), state if output_final_state else None


def _check_state(state: TTTState, q: Tensor, tau: Tensor, weights: tuple, biases: tuple):
    rows = len(q)
    learned = [p for layer in zip(weights, biases, strict=True) for p in layer]
    shapes = [(rows, *p.shape) for p in learned]
    for name in ("start", "sums"):
        if (given := [tuple(p.shape) for p in getattr(state, name)]) != shapes:
            raise ValueError(f"ttt_memory: initial_state is of another memory or batch: its {name} are {given}, here "
                             f"{shapes}")  # fmt: skip
    if len(state.offset) != rows:
        raise ValueError(f"ttt_memory: initial_state has counted the tokens of {len(state.offset)} rows, q has {rows}")
    if torch.compiler.is_compiling() or state.offset.device.type != "cpu":
        return  # reading it would break the graph, or wait for the GPU
    if (read := int(state.offset.max())) >= len(tau):
        raise ValueError(f"ttt_memory: initial_state has read {read} tokens of a mini-batch, of which this one has "
                         f"{len(tau)}; pass a state of the same mini-batch")  # fmt: skip


def _check(q, k, v, rate, tau, weights, biases, norm, reset, backend):
    def need(ok: bool, message: str):
        if not ok:
            raise ValueError(f"ttt_memory: {message}")

    need(
        q.dim() == 4 and q.shape == k.shape == v.shape and q.shape[1] > 0,
        f"q, k, v must share one shape (B, T, H, D) with T > 0, got {[tuple(x.shape) for x in (q, k, v)]}",
    )
    heads, width = q.shape[2:]
    need(rate.shape == q.shape[:3], f"rate must be {tuple(q.shape[:3])}, got {tuple(rate.shape)}")
    need(tau.dim() == 1 and len(tau) > 0, f"tau must have one entry per token of a mini-batch, got {tuple(tau.shape)}")
    ends = [width, *(w.shape[2] for w in weights)]
    need(
        len(weights) in (1, 2)
        and ends[-1] == width
        and all(tuple(w.shape[:2]) == (heads, d) for w, d in zip(weights, ends[:-1], strict=True)),
        f"weights must be one or two that chain (H, d_in, d_out) from D to D with H={heads}, D={width}, "
        f"got {[tuple(w.shape) for w in weights]}",
    )
    need(
        [tuple(b.shape) for b in biases] == [(heads, d) for d in ends[1:]],
        f"biases must be {[(heads, d) for d in ends[1:]]}, got {[tuple(b.shape) for b in biases]}",
    )
    need(len(norm) == 2 and all(tuple(p.shape) == (heads, width) for p in norm), f"norm must be two ({heads}, {width})")
    need(reset is None or (reset.dtype == torch.bool and reset.shape == q.shape[:2]), "reset must be bool (B, T)")
    need(backend in BACKENDS, f"backend {backend!r} is none of {', '.join(BACKENDS)}")
