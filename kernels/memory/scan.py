"""The recurrence over blocks as one differentiable operator: forward keeps few states, backward plays them back."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from titans_pt.kernels.memory import dual
from titans_pt.kernels.memory.dual import Coefficients
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import choose


@dataclass
class Plan:
    """What is known on the host about a run of n equally long blocks.

    new_chunk, new_document: per block, a bool for all rows or a bool tensor (B H,).
    to_start: whether forgetting leads to M_0, not to zero. gate_layers: 1 or L.
    save_every: blocks between two states that are kept.
    """

    new_chunk: list
    new_document: list
    network: NetworkShape
    to_start: bool
    gate_layers: int
    save_every: int


COEFFICIENTS = len(fields(Coefficients))


class MemoryScan(torch.autograd.Function):
    """apply(plan, q, k, v, *coefficients, *norm, *begin, *W, *S, *F) -> (out, *W, *S, *F).

    q, k, v: (n, N, c, D). coefficients: the fields of Coefficients, (gate_layers, n, N, ...). norm: two (N, 1, D), or
    none. begin: M_0, L weights (N, d_in, d_out) at which a document starts; none if no block needs it. W, S, F: the
    state, likewise; with to_start W is its difference to M_0.

    Memory of the backward pass: 3 weight sets per ``save_every`` blocks for the run, intermediates for that many.
    """

    @staticmethod
    def forward(ctx, plan: Plan, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor):
        tensors = _Arguments(plan, q, k, v, rest)
        state, saved, outputs = tensors.state, [], []
        for n in range(len(q)):
            if n % plan.save_every == 0:
                saved.extend(w for group in state for w in group)
            state, _, out, _ = tensors.step(n, state)
            outputs.append(out)
        ctx.plan = plan
        ctx.count = 3 + len(rest)
        ctx.save_for_backward(q, k, v, *rest, *saved)
        # A state that no block replaced is an input: autograd wants outputs of its own.
        after = [w for group in state for w in group]
        given = {id(w) for w in rest}
        return torch.stack(outputs), *(w.clone() if id(w) in given else w for w in after)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out: Tensor, *d_state: Tensor):
        plan, layers = ctx.plan, ctx.plan.network.depth
        tensors = ctx.saved_tensors
        (q, k, v, *rest), saved = tensors[: ctx.count], tensors[ctx.count :]
        arguments = _Arguments(plan, q, k, v, rest)
        grads = _Accumulated(arguments)
        dW, dS, dF = (list(d_state[i * layers : (i + 1) * layers]) for i in range(3))
        for first in reversed(range(0, len(q), plan.save_every)):
            sets = saved[first // plan.save_every * 3 * layers :][: 3 * layers]
            state = tuple(sets[i * layers : (i + 1) * layers] for i in range(3))
            played = []
            for n in range(first, min(first + plan.save_every, len(q))):
                state, began, _, kept = arguments.step(n, state)
                played.append((n, began, kept))
            while played:
                n, (W, S, F), kept = played.pop()
                g = dual.backward(
                    d_out[n], dW, dS, arguments.gates(n), arguments.norm, W, S, F, arguments.base, grads.begin, kept,
                    plan.network,
                )  # fmt: skip
                grads.add(n, g)
                dW, dS = g.W, g.S
                dF = g.F if dF is None else [a + b for a, b in zip(dF, g.F, strict=True)]
                dW, dS, dF = grads.boundary(plan, n, dW, dS, dF)
        dF = dF or [None] * layers
        return None, grads.q, grads.k, grads.v, *grads.coefficients, *grads.norm, *grads.begin, *dW, *dS, *dF


class _Arguments:
    """The flat arguments of MemoryScan by name, and one step of its recurrence."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, rest):
        layers = plan.network.depth
        self.plan, self.q, self.k, self.v = plan, q, k, v
        self.coefficients, rest = rest[:COEFFICIENTS], rest[COEFFICIENTS:]
        cut = 2 if plan.network.norm else 0
        self.norm, self.begin, state = rest[:cut], rest[cut : -3 * layers], rest[-3 * layers :]
        self.state = tuple(tuple(state[i * layers : (i + 1) * layers]) for i in range(3))
        self.base = self.begin if plan.to_start else None

    def gates(self, n: int) -> list[Coefficients]:
        shared = [
            Coefficients(*(c[layer, n] for c in self.coefficients)) for layer in range(self.plan.gate_layers)
        ]
        return shared if self.plan.gate_layers == self.plan.network.depth else shared * self.plan.network.depth

    def step(self, n: int, state):
        """State before block n -> state after it, state that the block began with, outputs, intermediates."""
        W, S, F = state
        document, chunk = self.plan.new_document[n], self.plan.new_chunk[n]
        if document is not False:
            zero = tuple(torch.zeros_like(s) for s in S)
            W = choose(document, self.begin if self.base is None else zero, W)
            S = choose(document, zero, S)
        if chunk is not False:
            whole = W if self.base is None else tuple(w0 + w for w0, w in zip(self.base, W, strict=True))
            F = choose(chunk, whole, F)
        out, new_W, new_S, kept = dual.forward(
            self.q[n], self.k[n], self.v[n], self.gates(n), self.norm, W, S, F, self.base, self.plan.network
        )
        return (new_W, new_S, F), (W, S, F), out, kept


class _Accumulated:
    """Gradients of MemoryScan's arguments, filled block by block from the last to the first."""

    def __init__(self, arguments: _Arguments):
        self.q, self.k, self.v = (torch.empty_like(x) for x in (arguments.q, arguments.k, arguments.v))
        self.coefficients = [torch.zeros_like(c) for c in arguments.coefficients]
        self.norm = [torch.zeros_like(p) for p in arguments.norm]
        self.begin = [torch.zeros_like(w) for w in arguments.begin]

    def add(self, n: int, g: dual.Gradients):
        self.q[n], self.k[n], self.v[n] = g.q, g.k, g.v
        for layer, gates in enumerate(g.gates):
            for total, field in zip(self.coefficients, fields(Coefficients), strict=True):
                total[min(layer, len(total) - 1), n] += getattr(gates, field.name)
        for total, part in zip(self.norm, g.norm, strict=True):
            total += part

    def boundary(self, plan: Plan, n: int, dW: list[Tensor], dS: list[Tensor], dF: list[Tensor]):
        """Gradients after block n's start -> gradients before it, where chunks and documents began; dF None for 0."""
        document, chunk = plan.new_document[n], plan.new_chunk[n]
        if chunk is not False:
            frozen = mask(chunk, dF)
            dW = [w + f for w, f in zip(dW, frozen, strict=True)]
            if plan.to_start:
                self._to_begin(frozen)
            dF = None if chunk is True else mask(~chunk, dF)
        if document is not False:
            if not plan.to_start:
                self._to_begin(mask(document, dW))
            others = False if document is True else ~document
            dW, dS = mask(others, dW), mask(others, dS)
        return dW, dS, dF

    def _to_begin(self, parts: list[Tensor]):
        for total, part in zip(self.begin, parts, strict=True):
            total += part


def mask(rows, tensors) -> list[Tensor]:
    """The tensors (N, ...) with the rows that are not chosen set to zero."""
    if rows is True:
        return list(tensors)
    if rows is False:
        return [torch.zeros_like(t) for t in tensors]
    return [torch.where(rows.view(-1, 1, 1), t, 0.0) for t in tensors]
