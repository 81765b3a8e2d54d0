"""One token of a stream on a CPU, for generation: the definition, in C (token.c)."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from titans_pt.kernels import native
from titans_pt.kernels.memory.call import Backend, MemoryCall, rule_alone
from titans_pt.kernels.memory.native import ACTIVATIONS, MAX_LAYERS
from titans_pt.kernels.memory.native import unserved as of_source
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import MemoryState, Weights, choose, state_dtype

SOURCE = Path(__file__).with_name("token.c")


class _Call(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("heads", "layers", "width", "hidden", "gate_layers", "activation", "norm", "residual", "to_start")
    ]


_Layers = ctypes.c_void_p * MAX_LAYERS


class _Inputs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "theta", "eta", "alpha", "gamma", "beta")),
        ("fresh", ctypes.c_char_p), *((name, _Layers) for name in ("begin", "W", "S", "F")),
    ]  # fmt: skip


class _Outputs(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("W", _Layers), ("S", _Layers)]


def unserved(x: Tensor, network: NetworkShape) -> str | None:
    """Reason why this source would not serve tensors of ``x``'s device and dtype; None if it would."""
    return of_source(x, network, SOURCE)


def _called(heads: int, network: NetworkShape, gate_layers: int = 1, to_start: bool = False) -> _Call:
    return _Call(
        heads, network.depth, network.width, network.hidden, gate_layers, ACTIVATIONS.index(network.activation),
        network.norm, network.residual, to_start,
    )  # fmt: skip


class MemoryToken:
    """Read and write of one token, set up once for inputs that keep their addresses: see :func:`next_token`.

    q, k, v: (B, 1, H, D) or with H and D merged; gates: (B, 1, H, 1 or L); norm: two (H, D); contiguous, of one dtype.
    out: like q, filled by each call.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: tuple[Tensor, Tensor, Tensor],
        *,
        network: NetworkShape,
        norm: Weights | None,
        chunk_size: int,
        to_start: bool,
    ):
        theta = gates[0]
        heads, layers = theta.shape[2:]
        self.out, self.to_start, self.chunk_size = torch.empty_like(q), to_start, chunk_size
        self._rows, self._kept = q.numel() // network.width, (q, k, v, gates, norm)
        self._call = _called(heads, network, layers, to_start)
        self._inputs = _Inputs(*(x.data_ptr() for x in (q, k, v, *gates, *(norm or ()))))
        self._outputs = _Outputs(self.out.data_ptr())
        self._function = native.compiled(SOURCE, q.dtype).token
        self._operations = 10 * self._rows * sum(a * b for a, b in network.layers)
        self._arguments = tuple(map(ctypes.byref, (self._call, self._inputs, self._outputs)))

    def __call__(self, start: Weights, state: MemoryState) -> MemoryState:
        """The state after the token; start: M_0, L tensors (H, d_in, d_out)."""
        offset = state.offset.tolist()
        fresh = [tokens == 0 for tokens in offset]
        begin, W, S, F = (
            [w.contiguous() for w in weights]
            for weights in (start if self.to_start else (), state.weights, state.momentum, state.chunk_weights)
        )
        now, momentum = tuple(map(torch.empty_like, W)), tuple(map(torch.empty_like, S))
        self._inputs.fresh = bytes(fresh)
        places = zip((self._inputs,) * 4 + (self._outputs,) * 2, ("begin", "W", "S", "F", "W", "S"),
                     (begin, W, S, F, now, momentum), strict=True)  # fmt: skip
        for struct, name, tensors in places:
            setattr(struct, name, _Layers(*(w.data_ptr() for w in tensors)))
        native.run(self._function, self._rows, self._operations, *self._arguments)
        frozen = choose(fresh, state.weights, state.chunk_weights)
        offset = [(tokens + 1) % self.chunk_size for tokens in offset]
        frozen = choose([tokens == 0 for tokens in offset], now, frozen)
        return MemoryState(now, momentum, frozen, torch.tensor(offset))


class MemoryRecall:
    """M(q) for one token of each row without writing, set up once for queries that keep their address.

    q: (B, 1, H, D) or with H and D merged; norm: two (H, D); contiguous, of one dtype. out: like q, filled by each
    call.
    """

    def __init__(self, q: Tensor, heads: int, *, network: NetworkShape, norm: Weights | None):
        self.out, self._kept, self._rows = torch.empty_like(q), (q, norm), q.numel() // network.width
        self._call = _called(heads, network)
        self._inputs = _Inputs(q.data_ptr())
        if norm:
            self._inputs.gamma, self._inputs.beta = (p.data_ptr() for p in norm)
        self._outputs = _Outputs(self.out.data_ptr())
        self._function = native.compiled(SOURCE, q.dtype).recall
        self._operations = 2 * self._rows * sum(a * b for a, b in network.layers)
        self._arguments = tuple(map(ctypes.byref, (self._call, self._inputs, self._outputs)))

    def __call__(self, weights: Weights):
        """weights: L tensors (B, H, d_in, d_out)."""
        kept = [w.contiguous() for w in weights]  # until the call ends
        self._inputs.W = _Layers(*(w.data_ptr() for w in kept))
        native.run(self._function, self._rows, self._operations, *self._arguments)


def next_token(call: MemoryCall) -> tuple[Tensor, MemoryState]:
    """Serve a call of one token: nothing is cut into blocks, nothing is kept for gradients."""
    dtype = state_dtype(call.q)
    given = (call.q, call.k, call.v, call.theta, call.eta, call.alpha)
    q, k, v, theta, eta, alpha = (x.to(dtype).contiguous() for x in given)
    norm = None if call.norm is None else tuple(p.to(dtype).contiguous() for p in call.norm)
    token = MemoryToken(
        q, k, v, (theta, eta, alpha), network=call.network, norm=norm, chunk_size=call.chunk_size,
        to_start=call.to_start,
    )  # fmt: skip
    assert call.state is not None
    state = token(tuple(w.to(dtype) for w in call.weights), call.state)
    return token.out, state


def _unserved(call: MemoryCall) -> str | None:
    dtype = state_dtype(call.q)
    if reason := rule_alone(call.rule, call.channelwise, call.stale, call.soup is not None):
        return reason
    if call.q.shape[1] != 1 or call.state is None or call.reset is not None or torch.is_grad_enabled():
        return "it is not one token of a stream, without gradients"
    if torch.compiler.is_compiling() or any(w.dtype != dtype for w in call.state.weights):
        return "a graph is being compiled, or the state has another dtype than its memory's"
    return unserved(call.q.new_empty(0, dtype=dtype), call.network)


TOKEN = Backend(_unserved, next_token)
