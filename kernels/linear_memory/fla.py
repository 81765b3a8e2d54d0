"""flash-linear-attention's chunk kernels (the package fla-core; its operators, none of its layers), on a GPU.

    no delta rule, decay None, (H,), (B, T, H)    chunk_simple_gla
    no delta rule, decay (B, T, H, K)             chunk_gla
    delta rule, no decay                          chunk_delta_rule
    delta rule, decay (H,), (B, T, H)             chunk_gated_delta_rule
    delta rule, decay (B, T, H, K)                chunk_kda
    delta rule with erase keys                    chunk_dplr_delta_rule

The last one computes S <- diag(exp(decay)) S + b (a^T S) + k v^T, where a reads S before the decay. It is called with
a = -e exp(decay), b = beta k, v = beta v.

All are called with scale = 1. Documents are passed as sequences of variable length (cu_seqlens): the rows are
concatenated, and each document has a separate state.
"""

import weakref
from importlib import import_module, metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from titans_pt.kernels.memory.dispatch import HAS_TRITON
from titans_pt.kernels.namespace import namespace

NAMESPACE = namespace(__name__, __file__)

HALF = (torch.float16, torch.bfloat16)
HAS_FLA = HAS_TRITON and find_spec("fla") is not None
NEEDED = (0, 6)
"""Oldest fla-core: in earlier versions chunk_delta_rule gives wrong gradients on Hopper (its issue 984)."""


def fla_linear_memory(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, erase: Tensor | None, state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results as in :func:`titans_pt.kernels.linear_memory.naive.naive_linear_memory`; q, k, v in a half
    precision, the others fp32. decay may also be (H,).

    A ``reset`` on the GPU makes the host wait once, not again when the next layer passes the same tensor.
    """
    delta = beta is not None or erase is not None
    if decay is not None and decay.dim() == 1 and (decay.requires_grad or delta):
        decay = decay.expand(q.shape[:3])  # kernels with a decay per head take it as a constant; delta rules have none
    k, v = k.to(q.dtype), v.to(q.dtype)
    if torch.compiler.is_compiling() or q.is_meta:
        return _operator(q, k, v, decay, beta, erase, state, reset)
    return _call(q, k, v, decay, beta, erase, state, reset)


def unsupported(
    q: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, erase: Tensor | None = None
) -> str | None:
    """Reason why the kernels cannot serve a call whose shapes fit each other, or None."""
    if not HAS_FLA:
        return "flash-linear-attention is not installed (pip install fla-core)"
    if q.device.type not in ("cuda", "meta"):
        return f"tensors are on {q.device.type}, not on a GPU"
    if q.dtype not in HALF:
        return f"dtype {q.dtype} is neither float16 nor bfloat16"
    delta = beta is not None or erase is not None
    if delta and q.shape[-1] > 256:
        return f"its delta rule has keys of at most 256, these have {q.shape[-1]}"
    if q.shape[-1] % 2 or v.shape[-1] % 2:
        return f"keys ({q.shape[-1]}) and values ({v.shape[-1]}) need even widths"
    installed = metadata.version("fla-core")
    if _numbers(installed) < NEEDED:
        return f"fla-core {installed} is older than {'.'.join(map(str, NEEDED))} (pip install --upgrade fla-core)"
    scalar = decay is not None and (decay.dim() == 3 or decay.dim() == 1 and (decay.requires_grad or delta))
    return _wrong_on_hopper(q) if scalar and erase is None and torch.is_grad_enabled() else None


def _wrong_on_hopper(q: Tensor) -> str | None:
    """Reason if fla issue 640 applies: some triton versions miscompile a per-token decay's backward pass on Hopper."""
    if q.is_meta or torch.cuda.get_device_capability(q.device)[0] != 9:
        return None
    triton = metadata.version("triton")
    if not (3, 4) <= _numbers(triton) < (3, 7, 1):
        return None
    return f"triton {triton} gives wrong gradients of a decay per token on Hopper; 3.7.1 or newer is right"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 3.7.1+git4 is (3, 7, 1)."""
    found = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def _chunk(name: str):
    # Not at the top: it imports triton and looks for a GPU, which other machines need not have.
    folder = "generalized_delta_rule" if name == "dplr_delta_rule" else name
    return getattr(import_module(f"fla.ops.{folder}"), f"chunk_{name}")


def _call(q, k, v, decay, beta, erase, state, reset) -> tuple[Tensor, Tensor]:
    """Call the kernel that fits the arguments; differentiable in all of them but a decay (H,)."""
    if erase is not None:
        if decay is None:
            decay = erase.new_zeros(erase.shape)
        decay = (decay if decay.dim() == 4 else decay.unsqueeze(-1)).expand(erase.shape)
        once = 1.0 if beta is None else beta.unsqueeze(-1)
        gates = {"a": (-erase * decay.exp()).to(q.dtype), "b": (once * k).to(q.dtype), "gk": decay}
        name, v = "dplr_delta_rule", (once * v).to(q.dtype)
    elif beta is not None:
        name, gates = "delta_rule", {"beta": beta}
        if decay is not None:
            name, gates = "gated_delta_rule" if decay.dim() == 3 else "kda", {"beta": beta, "g": decay}
    elif decay is not None and decay.dim() == 4:
        name, gates = "gla", {"g": decay}
    else:
        name, gates = "simple_gla", {}
        if decay is not None:
            gates = {"g_gamma" if decay.dim() == 1 else "g": decay}
    options = {"scale": 1.0, "output_final_state": True}
    if reset is None:
        return _chunk(name)(q, k, v, **gates, **options, initial_state=state)

    bounds, on_device, first, last = _documents(reset, q.device)
    inherited = state.masked_fill(reset[:, 0].to(q.device).view(-1, 1, 1, 1), 0.0)
    states = state.new_zeros(len(bounds) - 1, *state.shape[1:]).index_copy(0, first, inherited)
    lie = [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v)]
    gates = {n: g if g.dim() == 1 else g.flatten(0, 1).unsqueeze(0) for n, g in gates.items()}
    out, states = _chunk(name)(
        *lie, **gates, **options, initial_state=states, cu_seqlens=on_device, cu_seqlens_cpu=bounds
    )
    return out.view(*q.shape[:3], -1), states.index_select(0, last)


_known: tuple | None = None
_by_stream: dict[tuple, tuple[Tensor, Tensor, Tensor, Tensor]] = {}


def _documents(reset: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bounds of documents in the concatenated rows, (N + 1,) int64, on the CPU and on ``device``.

    Also returns the indices of each row's first and last document, (B,) int64, on ``device``.

    The last answer is cached, since layers ask in turn: the host waits for the GPU once. Each stream gets a separate
    copy, since a copy that one stream has queued need not be done when another stream reads it.
    """
    global _known
    version = None if reset.is_inference() else reset._version  # inference tensors have none, and may have changed
    if _known is None or version is None or _known[0]() is not reset or _known[1] != version:
        _known = weakref.ref(reset), version, _bounds(reset)
        _by_stream.clear()
    key = device, _stream(device)
    if key not in _by_stream:
        bounds, first, last = (x.to(device, non_blocking=True, copy=True) for x in _known[2])
        _by_stream[key] = _known[2][0], bounds, first, last
    return _by_stream[key]


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _bounds(reset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Result of :func:`_documents`, on the CPU."""
    rows, length = reset.shape
    starts = reset.cpu().clone()
    starts[:, 0] = True
    bounds = torch.cat([starts.flatten().nonzero().flatten(), torch.tensor([rows * length])])
    ends = starts.sum(1).cumsum(0)
    return bounds, ends - starts.sum(1), ends - 1


@torch.library.custom_op(f"{NAMESPACE}::delta_memory", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`_call` as one operator, which torch.compile's graph can hold without a break.

    Its backward pass runs the forward pass again, since an operator cannot keep tensors that autograd saved inside it.
    """
    with torch.no_grad():
        out, after = _call(q, k, v, decay, beta, erase, state, reset)
    return out.contiguous(), after.contiguous()


@_operator.register_fake
def _(q, k, v, decay, beta, erase, state, reset):
    return torch.empty_like(v), torch.empty_like(state)


def _backward_operator(d_out, d_state, q, k, v, decay, beta, erase, state, reset):
    """Return gradients of q, k, v, decay, beta, erase and state; a tensor of one zero for an input without gradient."""
    constant = decay is None or decay.dim() == 1
    differentiable = q, k, v, None if constant else decay, beta, erase, state
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in differentiable]
        given = [*leaves[:3], decay if constant else leaves[3], *leaves[4:], reset]
        out, after = _call(*given)
        asked = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad([out, after], asked, [d_out, d_state]))
    return tuple(state.new_zeros(1) if x is None else next(found).contiguous() for x in leaves)


def _backward_shapes(d_out, d_state, q, k, v, decay, beta, erase, state, reset):
    constant = decay is None or decay.dim() == 1
    leaves = q, k, v, None if constant else decay, beta, erase, state
    return tuple(state.new_empty(1) if x is None else torch.empty_like(x) for x in leaves)


# Not a custom_op: PyTorch runs the body of a custom_op with autograd disabled, and this body differentiates. Unlike a
# custom_op it is not redefined when this source is loaded twice (from exported folders): the first definition stays.
if not hasattr(getattr(torch.ops, NAMESPACE), "delta_memory_backward"):
    torch.library.define(
        f"{NAMESPACE}::delta_memory_backward",
        "(Tensor d_out, Tensor d_state, Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor? erase, "
        "Tensor state, Tensor? reset) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    )
    torch.library.impl(f"{NAMESPACE}::delta_memory_backward", "default", _backward_operator)
    torch.library.register_fake(f"{NAMESPACE}::delta_memory_backward", _backward_shapes)
_BACKWARD = getattr(torch.ops, NAMESPACE).delta_memory_backward


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_out, d_state):
    saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
    decay, beta, erase = saved[3:6]
    d_q, d_k, d_v, *d_gates, d_first = _BACKWARD(d_out, d_state, *saved)
    differentiable = decay is not None and decay.dim() > 1, beta is not None, erase is not None
    d_gates = [d if asked else None for d, asked in zip(d_gates, differentiable, strict=True)]
    return d_q, d_k, d_v, *d_gates, d_first, None


_operator.register_autograd(_backward, setup_context=_setup)
