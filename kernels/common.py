"""Helpers that the entries of all kernels share."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from titans_pt.errors import UserError
from titans_pt.kernels.warned import warned_of

Gradients = Tensor | Sequence[Tensor | None]
"""Results of an autograd.Function's backward pass."""


def no_autocast(x: Tensor):
    """Context that disables autocast on ``x``'s device."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``. From the host to a GPU, without waiting for the work that the GPU still has to do.

    Copies from a GPU wait: on the host their numbers could be read before they arrive.
    """
    return x.to(device, non_blocking=x.device.type == "cpu")


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Context in which autograd records, even inside torch.inference_mode(), which enable_grad() does not leave.

    Tensors made in inference mode must pass through :func:`recordable`.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield


def recordable(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors, with inference tensors copied, because autograd refuses them.

    Call it inside :func:`recording`: in inference mode the copies would be inference tensors again.
    """
    return tuple(t.clone() if t.is_inference() else t for t in tensors)


def transformed() -> str | None:
    """Reason why only PyTorch's operators can serve a call here; None elsewhere, and while a graph is compiled.

    Inside torch.func's transforms, tensors have no memory of their own. torch.jit.trace would not see what kernels in C
    write. Inside torch.autograd.forward_ad.dual_level(), also under no_grad(), results of other kernels would silently
    lack tangents.
    """
    if torch.compiler.is_compiling():
        return None
    if torch.jit.is_tracing():
        return "torch.jit.trace records PyTorch's operators alone"
    if torch.autograd.forward_ad._current_level >= 0:
        return "derivatives are computed forward, which PyTorch's operators alone can do"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms the call, which needs PyTorch's operators"
    return None


def refuse_export(what: str):
    """
    Raises:
        UserError: torch.export or torch.jit.trace traces a call of ``what``, whose loop stays outside graphs.
    """
    traced = torch.jit.is_tracing()
    # Not is_exporting(): in a graph of torch.compile, PyTorch 2.11 takes it to be True.
    if traced or getattr(torch.compiler, "_is_exporting_flag", False):
        raise UserError(f"{'torch.jit.trace' if traced else 'torch.export'}: given {what}, whose loop over blocks of "
                        "tokens is in no graph here; compile the model with torch.compile, or export only its other "
                        "parts")  # fmt: skip


def warn_once(message: str):
    """Warn once per message, whatever the warning filters."""
    if torch.compiler.is_compiling():  # a warning in a block's graph would cut it in two
        from titans_pt.kernels.compiling import warn
    else:
        warn = warned_of
    warn(message)


def first_derivatives_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate backward(ctx, saved, *upstream) of an autograd.Function that has first derivatives only.

    ``saved`` are ctx.saved_tensors, fetched once: activation checkpointing hands them out a single time. Under
    create_graph=True the gradients depend on ``upstream`` and ``saved`` through a function whose backward pass raises
    RuntimeError. torch.autograd.function.once_differentiable raises only if a gradient of ``upstream`` is asked for:
    a gradient penalty would silently lack the terms that pass through ``saved``. The function must save its tensors as
    it received them, not rearranged.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # torch.compile refuses by itself
            return backward(ctx, saved, *upstream)
        with torch.no_grad():
            found = backward(ctx, saved, *upstream)
        causes = [t for t in (*upstream, *saved) if t is not None and t.requires_grad]
        if not causes:
            return found
        gradients = [found] if isinstance(found, Tensor) else found
        given = [g for g in gradients if g is not None]
        linked = iter(_FirstDerivatives.apply(len(given), *given, *causes))
        return tuple(g if g is None else next(linked) for g in gradients)

    return checked


class _FirstDerivatives(torch.autograd.Function):
    """apply(count, *gradients, *causes) -> the gradients, ``count`` of them."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_upstream):
        raise RuntimeError(
            "titans_pt's kernels have first derivatives only: a gradient of a gradient (create_graph=True) cannot "
            "pass through them; with TITANS_NATIVE=0 in the environment, PyTorch's operators, which have second ones, "
            "compute convolutions, norms and recurrences on a CPU, but not a memory's writes"
        )
