"""One-token steps: each is prepared once, for tensors at fixed addresses, and then called for every token.

A call takes a microsecond or two, about as long as each of the dozen PyTorch operators that it replaces. It checks
nothing: tensors are contiguous, of one dtype, and no other thread uses them.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titans_pt.kernels import native

SOURCE = Path(__file__).with_name("steps.c")
ACTIVATIONS = ("identity", "silu", "sigmoid")
"""Activations in the order of steps.c."""
Step = Callable[[], object]


def unserved(x: Tensor) -> str | None:
    """Reason why these steps do not serve tensors of ``x``'s device and dtype; None if they do."""
    return native.unserved(SOURCE, x)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a tensor for C; NULL for None.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if tensor is None:
        return ctypes.c_void_p(None)
    if not tensor.is_contiguous():
        raise ValueError(f"a step's tensors must be contiguous, given strides {tensor.stride()}")
    return ctypes.c_void_p(tensor.data_ptr())


def _step(name: str, like: Tensor, *arguments: Tensor | int | None) -> Step:
    """A call of steps.c's function ``name`` compiled for ``like``'s dtype."""
    function = getattr(native.compiled(SOURCE, like.dtype), name)
    ready = [ctypes.c_int64(a) if isinstance(a, int) else pointer(a) for a in arguments]

    def step(_kept=arguments):  # keeps the tensors, of which C only has the addresses
        return function(*ready)

    return step


class Rotation:
    """Rotary embedding of one position: cosine and sine, (D / 2), as in titans_pt.layers.rotary.

    Args:
        turns: (D / 2,) fp64, turns per token of each pair of features.
    """

    def __init__(self, turns: Tensor, like: Tensor):
        half = len(turns)
        self.cosine, self.sine = like.new_empty(half), like.new_empty(half)
        self._turns = turns.cpu()
        self._function = native.compiled(SOURCE, like.dtype).rotation
        self._rest = ctypes.c_int64(half), pointer(self._turns), pointer(self.cosine), pointer(self.sine)

    def at(self, place: int):
        self._function(ctypes.c_int64(place), *self._rest)


class Map(NamedTuple):
    """Linear map y = weight x + bias, with optional steps after it.

    In this order: a causal convolution, an activation, heads normalised to unit length, an RMSNorm of every head, a
    rotation, a factor, a term.

    x: (B, inputs), or the index of an earlier map, whose y is taken. weight: (outputs, inputs). bias: (outputs,).
    taps: (outputs, width), filters over time, the tap of the token itself last.
    activation: see ACTIVATIONS. unit: normalise every head of this many outputs to unit length; 0: none.
    norm: (head width,), the RMSNorm's weight, for every head of this width. eps: the RMSNorm's.
    rotation: rotates every head.
    factor, term: (B, outputs), or the index of an earlier map.
    """

    x: Tensor | int
    weight: Tensor
    bias: Tensor | None = None
    taps: Tensor | None = None
    activation: str = "identity"
    unit: int = 0
    norm: Tensor | None = None
    eps: float = 0.0
    rotation: Rotation | None = None
    factor: Tensor | int | None = None
    term: Tensor | int | None = None


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p)
          for name in ("x", "weight", "bias", "taps", "past", "norm", "cosine", "sine", "factor", "term",
                       "out", "newest", "unturned")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "width", "activation", "unit", "normal", "head")),
        ("eps", ctypes.c_double),
    ]  # fmt: skip


class Maps:
    """Maps of one token, run in order.

    out: the y of each map, (B, outputs). unturned: y before the rotation, for each map that has one; else None.
    """

    def __init__(self, batch: int, *maps: Map):
        self.out: list[Tensor] = []
        self.unturned: list[Tensor | None] = []
        self._maps = (_Map * len(maps))()
        self._past: dict[int, Tensor] = {}
        self._kept = maps
        for place, one in zip(self._maps, maps, strict=True):
            x, factor, term = (self.out[t] if isinstance(t, int) else t for t in (one.x, one.factor, one.term))
            outputs, inputs = one.weight.shape
            turn = one.rotation
            y = one.weight.new_empty(batch, outputs)
            cosine, sine, plain = (None,) * 3 if turn is None else (turn.cosine, turn.sine, torch.empty_like(y))
            for name, tensor in {
                "x": x, "weight": one.weight, "bias": one.bias, "taps": one.taps, "norm": one.norm,
                "factor": factor, "term": term, "out": y, "unturned": plain,
                "cosine": cosine, "sine": sine,
            }.items():  # fmt: skip
                if tensor is not None and tensor.dtype != y.dtype:
                    raise ValueError(f"{name}: given {tensor.dtype}; must be {y.dtype}, as the weight is")
                setattr(place, name, pointer(tensor))
            place.inputs, place.outputs, place.unit = inputs, outputs, one.unit
            place.normal, place.eps = 0 if one.norm is None else len(one.norm), one.eps
            place.width = 1 if one.taps is None else one.taps.shape[1]
            place.activation = ACTIVATIONS.index(one.activation)
            place.head = 0 if turn is None else 2 * len(turn.cosine)
            self.out.append(y)
            self.unturned.append(plain)
        self._function = native.compiled(SOURCE, maps[0].weight.dtype).project
        self._rest = ctypes.c_int64(batch), self._maps, ctypes.c_int64(len(maps))

    def follow(self, place: int, past: Tensor) -> Tensor:
        """Set the state of the convolution of the map at index ``place`` for the next call.

        past (B, width - 1, outputs): the convolution's inputs before the next token. Returns the tensor that the next
        call fills with the state for the token after it; ``past`` itself if the map has no convolution.
        """
        if self._maps[place].width == 1:
            return past
        past = self._past[place] = past.contiguous()
        newest = torch.empty_like(past)
        self._maps[place].past, self._maps[place].newest = past.data_ptr(), newest.data_ptr()
        return newest

    def __call__(self):
        self._function(*self._rest)


def add(a: Tensor, weight: Tensor | None, b: Tensor) -> tuple[Tensor, Step]:
    """Return the tensor of a + weight b, (B, width), and the step that fills it; weight (width,), or None for 1."""
    out = torch.empty_like(a)
    return out, _step("add", a, *a.shape, a, weight, b, out)


def blend(a: Tensor, b: Tensor, share: Tensor) -> tuple[Tensor, Step]:
    """Return the tensor of a + share (b - a), (B, H D) like a and b, and the step that fills it; share (B, H)."""
    out = torch.empty_like(a)
    return out, _step("blend", a, share.numel(), a.numel() // share.numel(), a, b, share, out)


class _Gates(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "hard", "free", "momentum", "forgetting")),
        *((name, ctypes.c_double) for name in ("bound", "stretch")),
    ]


def memory_gates(
    raw: Tensor, *, hard: bool, free: bool, momentum: bool, forgetting: bool, bound: float, stretch: float
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[bool], object]]:
    """Return theta, eta, alpha, (B, n) each, and the step that computes them from raw (B, n, 3).

    Same gates as :class:`titans_pt.layers.memory.MemoryGates`. The step's argument says whether the memory writes at
    all.
    """
    theta, eta, alpha = (torch.empty_like(raw[..., 0], memory_format=torch.contiguous_format) for _ in range(3))
    call = _Gates(theta.numel(), hard, free, momentum, forgetting, bound, stretch)
    function = native.compiled(SOURCE, raw.dtype).memory_gates
    given, made = (ctypes.byref(call), pointer(raw)), [pointer(gate) for gate in (theta, eta, alpha)]

    def step(writes: bool, _kept=raw):
        return function(*given, ctypes.c_int64(writes), *made)

    return (theta, eta, alpha), step
