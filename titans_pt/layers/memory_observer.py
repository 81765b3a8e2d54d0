"""Observe a model's memories from outside while it reads: each token's gates and surprise, and the norms after it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.kernels.memory import (
    MemoryState,
    memory_trace,
    neural_memory,
    self_modifying_memory,
    self_modifying_trace,
)
from titans_pt.kernels.memory.call import Author
from titans_pt.layers.caching import segment_starts
from titans_pt.layers.memory import NeuralMemory
from titans_pt.layers.self_modifying import SelfModifyingMemory
from titans_pt.layers.state import map_tensors

Observed = NeuralMemory | SelfModifyingMemory
"""A memory that can be observed."""


@dataclass
class MemoryFigures:
    """Figures of one memory, each (B, T, H) fp32 on the CPU. Gates are means over its matrices if each has its own. A
    SelfModifyingMemory gives the figures of its main memories.

    surprise: ||grad_W ||M(k_t) - v_t||^2||, at the weights of the chunk's start. theta, eta, alpha: the gates.
    weight_norm, momentum_norm: ||M_t||, ||S_t||. Norms are Frobenius, over all matrices of a head together.
    """

    surprise: Tensor
    theta: Tensor
    eta: Tensor
    alpha: Tensor
    weight_norm: Tensor
    momentum_norm: Tensor


@dataclass
class _KernelInputs:
    """Inputs of a memory's kernel in one call. tokens: k, v and gates, or, with an author, the queries."""

    tokens: tuple[Tensor, ...]
    author: Author | None
    weights: tuple[Tensor, ...]
    norm: tuple[Tensor, Tensor] | None
    state: MemoryState | None
    reset: Tensor | None

    @property
    def length(self) -> int:
        return self.tokens[0].shape[1]

    def first_row(self) -> "_KernelInputs":
        """The same call of the first row alone, as copies, which keep no other tensor alive."""
        tree = (self.tokens, self.state, self.reset)
        tokens, state, reset = map_tensors(tree, lambda x: x[:1].detach().clone())
        return replace(self, tokens=tokens, state=state, reset=reset)

    def cut(self, place: int) -> tuple["_KernelInputs", "_KernelInputs"]:
        """Split into two calls at the token ``place``; the caller sets the state of the second."""

        def part(tokens: slice) -> _KernelInputs:
            own, reset = map_tensors((self.tokens, self.reset), lambda x: x[:, tokens])
            return replace(self, tokens=own, reset=reset)

        return part(slice(None, place)), part(slice(place, None))


class MemoryObserver:
    """Recorder of one memory's calls, through hooks on the memory and its parts, until it is closed.

    With ``newest`` it keeps only the first row of the newest call, for :meth:`sample`.
    """

    def __init__(self, memory: Observed, newest: bool = False):
        self.memory, self.newest = memory, newest
        self._calls: list[_KernelInputs] = []
        self._parts: dict[str, Any] = {}
        self._signature = inspect.signature(memory.forward)
        names = ("x", "q", "gates.readout") if isinstance(memory, SelfModifyingMemory) else ("k", "v", "gates")
        parts = {name: memory.get_submodule(name) for name in (*names, "network")}
        self._handles = [part.register_forward_hook(partial(self._part, name)) for name, part in parts.items()]
        self._handles.append(memory.register_forward_hook(self._call, with_kwargs=True))

    def _part(self, name: str, _module: nn.Module, _args: tuple, output: object):
        self._parts[name] = output

    def _call(self, _module: nn.Module, args: tuple, kwargs: dict, _output: object):
        given = self._signature.bind(*args, **kwargs).arguments
        state = given.get("state")
        documents = given.get("documents")
        starts = documents.starts if documents else given.get("reset")  # the layer of titans_pt.library takes a mask
        caching = getattr(self.memory, "caching", None)
        if caching is not None and caching.config.fresh and not given.get("chunk_size"):
            rows, length = given["x"].shape[:2]
            place = state.caches.place if state and state.caches else torch.zeros(rows, dtype=torch.int64)
            starts = segment_starts(place, length, caching.config.segment, starts)
        parts = self._parts
        weights, norm = parts["network"]
        tokens: tuple[Tensor, ...]
        author: Author | None = None
        if isinstance(self.memory, SelfModifyingMemory):
            tokens = (self.memory.queries(parts["x"][0], parts["q"][0]),)
            author = partial(self.memory.written, parts["gates.readout"])
        else:
            tokens = (parts["k"][0], parts["v"][0], *parts["gates"])
            if state and state.start:
                weights = tuple(w[0] for w in state.start)
        call = _KernelInputs(tokens, author, given.get("start") or weights, norm, state and state.memory, starts)
        parts.clear()
        if self.newest:
            self._calls = [call.first_row()]
        else:
            self._calls.append(call)

    def take(self, tokens: int) -> MemoryFigures:
        """Figures of the last ``tokens`` tokens, read in any number of calls; all recorded calls are then dropped.

        Tokens read before them are the persistent prefix, which is no part of the text.
        """
        calls: list[_KernelInputs] = []
        left = tokens
        while left > 0:
            calls.insert(0, self._calls.pop())
            left -= calls[0].length
        if left < 0:
            raise RuntimeError(f"a memory read {-left} tokens more than the model was given")
        self._calls.clear()
        pieces = zip(*(self._figures(call) for call in calls), strict=True)
        return MemoryFigures(*(torch.cat(piece, 1).float().cpu() for piece in pieces))

    @torch.no_grad()
    def sample(self, tokens: int) -> MemoryFigures:
        """Figures of the last ``tokens`` tokens (fewer if it had fewer) that the newest call read in its first row.

        It is cheap: the kernel reads the tokens before them, and only these tokens are traced.
        """
        call = self._calls.pop().first_row()
        self._calls.clear()
        before = max(call.length - tokens, 0)
        if before:
            past, call = call.cut(before)
            options = self._options(past) | {"output_final_state": True}
            if past.author is None:
                k, v, theta, eta, alpha, *own = past.tokens
                _, call.state = neural_memory(
                    k, k, v, theta, eta, alpha, past.weights, own=tuple(own), **options
                )  # fmt: skip
            else:
                (q,) = past.tokens
                _, call.state = self_modifying_memory(q, past.author, past.weights, **options)
        return MemoryFigures(*(figure.float().cpu() for figure in self._figures(call)))

    def _options(self, call: _KernelInputs) -> dict:
        return {
            "network": self.memory.shape,
            "rule": self.memory.gates.rule,
            "norm": call.norm,
            "chunk_size": self.memory.config.chunk_size,
            "forget_to": self.memory.config.forget_to,
            "initial_state": call.state,
            "reset": call.reset,
        }

    def _figures(self, call: _KernelInputs) -> tuple[Tensor, ...]:
        if call.author is None:
            k, v, theta, eta, alpha, *own = call.tokens
            trace = memory_trace(k, v, theta, eta, alpha, call.weights, own=tuple(own), **self._options(call))
            shown = slice(None)
        else:
            (q,) = call.tokens
            trace = self_modifying_trace(q, call.author, call.weights, **self._options(call))
            shown = SelfModifyingMemory.main
        found = trace.surprise, trace.theta, trace.eta, trace.alpha, trace.weight_norm, trace.momentum_norm
        return tuple(figure[..., shown] for figure in found)

    def close(self):
        for handle in self._handles:
            handle.remove()


def memories_of(model: nn.Module) -> dict[str, Observed]:
    """Every memory of ``model`` that can be observed, by the module's name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Observed)}


@contextmanager
def observe_memories(model: nn.Module, newest: bool = False) -> Iterator[dict[str, MemoryObserver]]:
    """A MemoryObserver for each memory of ``model``, by the module's name, while the ``with`` block runs."""
    observers = {name: MemoryObserver(memory, newest) for name, memory in memories_of(model).items()}
    try:
        yield observers
    finally:
        for observer in observers.values():
            observer.close()


@contextmanager
def without_prefixes(model: nn.Module, seen: list) -> Iterator[None]:
    """In the ``with`` block, persistent tokens that the model's memories write leave nothing in ``seen``, a list that
    the caller's hooks append to.

    Persistent tokens belong to no row, and how often they are written depends on the micro-batches and context ranks
    that share the rows: a mean over tokens that counts them would depend on these.
    """

    def pass_over(memory: Any):
        """Shadow the method that writes persistent tokens by one that forgets what hooks noted."""
        write = memory.start_after

        def start_after(prefix: Tensor) -> Any:
            before = len(seen)
            found = write(prefix)
            del seen[before:]
            return found

        memory.start_after = start_after

    memories: list[Any] = [module for module in model.modules() if hasattr(module, "start_after")]
    for memory in memories:
        pass_over(memory)
    try:
        yield
    finally:
        for memory in memories:
            del memory.start_after
