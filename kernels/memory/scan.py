"""The recurrence over blocks as one differentiable operator: writes block by block, reads of many blocks at once."""

from dataclasses import dataclass, fields
from itertools import repeat

import torch
from torch import Tensor

from titans_pt.kernels.blocks import Flag
from titans_pt.kernels.common import first_derivatives_only
from titans_pt.kernels.memory import dual
from titans_pt.kernels.memory.coefficients import Coefficients, Ends
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Rule
from titans_pt.kernels.memory.state import Weights, choose
from titans_pt.kernels.memory.tree import each, joined, leaves, rebuilt


@dataclass
class ScanPlan:
    """Layout of a run of n equally long blocks, as the host knows it.

    new_chunk, new_document: per block, a bool for all rows or a bool tensor (B H,).
    to_start: whether the memory forgets to M_0 instead of zero. gate_layers: 1 or L.
    group: number of blocks that are read at once. keep: whether a forward pass keeps the intermediates of its backward
    pass; else it keeps the state at each group's start, from which the group is recomputed.
    whole, at_start, silent: for native.NativeScan only. Whether tokens keep the caller's layout; whether they read
    their chunk's start; whether they read nothing.
    """

    new_chunk: list[Flag]
    new_document: list[Flag]
    network: NetworkShape
    rule: Rule
    to_start: bool
    gate_layers: int
    group: int
    keep: bool
    whole: bool = False
    at_start: bool = False
    silent: bool = False


COEFFICIENTS = len(fields(Coefficients))


class MemoryScan(torch.autograd.Function):
    """apply(plan, q, k, v, *own, *coefficients, *norm, *begin, *W, *S, *F) -> (out, *W, *S, *F).

    q, k, v: (n, N, c, D). own: the rule's own gates, (n, N, c, 1) each. coefficients: the fields of Coefficients,
    (gate_layers, n, N, ...). norm: two (N, 1, D), or none. begin: M_0, L weights (N, d_in, d_out) at which a document
    starts; none if no block needs it. W, S, F: the state, in the same shapes; with to_start W is the difference to M_0.
    """

    @staticmethod
    def forward(ctx, plan: ScanPlan, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor):
        scan = _Scan(plan, q, k, v, rest)
        state, outputs, kept = scan.state, [], []
        for blocks in scan.groups:
            begun = state
            out, state, work = scan.run(blocks, state)
            outputs.append(out)
            work = (work, begun[2]) if plan.keep else begun
            kept += leaves(work)
        ctx.plan, ctx.count, ctx.kept = plan, 3 + len(rest), rebuilt(work, repeat(q.new_empty(0)))
        ctx.save_for_backward(q, k, v, *rest, *kept)
        ctx.set_materialize_grads(False)
        # A state that no block replaced is an input: autograd needs a new tensor as output.
        given = {id(w) for w in rest}
        after = (w.clone() if id(w) in given else w for w in leaves(state))
        return torch.cat(outputs).view_as(q), *after

    @staticmethod
    @first_derivatives_only
    def backward(ctx, saved, d_out: Tensor | None, *d_state: Tensor | None):
        q, k, v, *rest = saved[: ctx.count]
        scan = _Scan(ctx.plan, q, k, v, rest)
        tensors = iter(saved[ctx.count :])
        kept = [rebuilt(ctx.kept, tensors) for _ in scan.groups]
        d_out = torch.zeros_like(q) if d_out is None else d_out
        grads = _Gradients(scan, d_state)
        for blocks in reversed(scan.groups):
            begun = kept.pop()
            work, frozen = begun if ctx.plan.keep else (scan.run(blocks, begun)[2], begun[2])
            grads.add(blocks, d_out[blocks.start : blocks.stop].flatten(0, 1), work, frozen)
        return (
            None, grads.q, grads.k, grads.v, *grads.own, *grads.coefficients, *grads.norm, *grads.begin, *grads.now,
            *grads.F,
        )  # fmt: skip


@dataclass
class _Work:
    """Tensors that a group of K blocks keeps for its backward pass; W, S: at each block's start, (K N, d_in, d_out)."""

    keys: dual.Keys
    aim: dual.Aim
    queries: dual.Queries
    W: Weights
    S: Weights


class _Scan:
    """The flat arguments of MemoryScan by name, and its forward pass, a group of blocks at a time."""

    def __init__(self, plan: ScanPlan, q: Tensor, k: Tensor, v: Tensor, rest):
        layers = plan.network.depth
        self.plan, self.q, self.k, self.v = plan, q, k, v
        own = len(plan.rule.gates)
        self.own, rest = tuple(rest[:own]), rest[own:]
        self.coefficients, rest = rest[:COEFFICIENTS], rest[COEFFICIENTS:]
        cut = 2 if plan.network.norm else 0
        self.norm, self.begin, state = rest[:cut], rest[cut : -3 * layers], rest[-3 * layers :]
        W, S, F = (tuple(state[i * layers : (i + 1) * layers]) for i in range(3))
        self.state = W, S, F
        self.base = self.begin if plan.to_start else None
        self.groups = [range(n, min(n + plan.group, len(q))) for n in range(0, len(q), plan.group)]

    def gates(self, blocks: range) -> list[Coefficients]:
        """The coefficients of each layer, (K N, ...)."""
        own = [
            Coefficients(*(c[layer, blocks.start : blocks.stop].flatten(0, 1) for c in self.coefficients))
            for layer in range(self.plan.gate_layers)
        ]
        return own if len(own) == self.plan.network.depth else own * self.plan.network.depth

    def norms(self, blocks: range) -> Weights:
        """The LayerNorm of every block's rows, (K N, 1, D)."""
        return tuple(p.repeat(len(blocks), 1, 1) for p in self.norm)

    def run(self, blocks: range, state: tuple[Weights, Weights, Weights]):
        """State before the group -> outputs (K N, c, D), the state after it, tensors for the backward pass."""
        network, layers, count = self.plan.network, self.plan.network.depth, len(blocks)
        gates, norm = self.gates(blocks), self.norms(blocks)
        q, k, v, *own = (x[blocks.start : blocks.stop].flatten(0, 1) for x in (self.q, self.k, self.v, *self.own))
        aim = dual.Aim.of(k, v, tuple(own), norm, network)
        aims, of_blocks = each(aim, count), each(gates, count)
        W, S, F = state
        now = (*W, *S)
        starts = [w.new_empty(count, *w.shape) for w in now]
        slots = [*zip(*(w.unbind() for w in starts), strict=True), tuple(torch.empty_like(w) for w in now)]
        keys = []
        for i, n in enumerate(blocks):
            if i == 0 or self.plan.new_document[n] is not False:
                for slot, w in zip(slots[i], self._begun(n, now), strict=True):
                    slot.copy_(w)
            now = slots[i]
            F = self.frozen(n, now[:layers], F)
            keys.append(dual.key_side(self.k[n], aims[i], self.norm, F, network, self.plan.rule))
            ends = [Ends.of(c) for c in of_blocks[i]]
            dual.write(keys[i], ends, now[:layers], now[layers:], slots[i + 1])
            now = slots[i + 1]
        keys = joined(keys)
        begun = tuple(w.flatten(0, 1) for w in starts)
        W, S = begun[:layers], begun[layers:]
        out, queries = dual.read(q, keys, gates, norm, W, S, self.base, network)
        return out, (now[:layers], now[layers:], F), _Work(keys, dual.Aim(None, aim.v, aim.own), queries, W, S)

    def _begun(self, n: int, now: Weights) -> Weights:
        """W and S at the start of block n, from those before it: M_0 and 0 in rows where a document begins."""
        document = self.plan.new_document[n]
        if document is False:
            return now
        zero = tuple(torch.zeros_like(w) for w in now[len(now) // 2 :])
        return choose(document, (*(self.begin if self.base is None else zero), *zero), now)

    def frozen(self, n: int, W: Weights, F: Weights) -> Weights:
        """Weights at which block n's gradients are taken: the block's first weights if it begins a chunk, else F."""
        chunk = self.plan.new_chunk[n]
        if chunk is False:
            return F
        whole = W if self.base is None else tuple(w0 + w for w0, w in zip(self.base, W, strict=True))
        return choose(chunk, whole, F)


class _Gradients:
    """Gradients of MemoryScan's arguments, filled group by group from the last to the first.

    now: gradients of W and S at the current block. F: gradients of the frozen weights there, None for 0.
    """

    def __init__(self, scan: _Scan, d_state: tuple[Tensor | None, ...]):
        layers = scan.plan.network.depth
        self.scan = scan
        self.q, self.k, self.v = (torch.empty_like(x) for x in (scan.q, scan.k, scan.v))
        self.own = [torch.empty_like(x) for x in scan.own]
        self.coefficients = [torch.zeros_like(c) for c in scan.coefficients]
        self.norm = [torch.zeros_like(p) for p in scan.norm]
        self.begin = [torch.zeros_like(w) for w in scan.begin]
        state = leaves(scan.state[:2])
        now = zip(state, d_state[: 2 * layers], strict=True)
        self.now = tuple(torch.zeros_like(w) if d is None else d for w, d in now)
        self.F = [None if d is None else d.clone() for d in d_state[2 * layers :]]

    def add(self, blocks: range, d_out: Tensor, work: _Work, F: Weights):
        """Add a group's gradients. d_out: (K N, c, D). F: the frozen weights before the group."""
        scan, network, layers, count = self.scan, self.scan.plan.network, self.scan.plan.network.depth, len(blocks)
        gates, norm = scan.gates(blocks), scan.norms(blocks)
        ends = [Ends.of(c) for c in gates]
        read = dual.read_backward(
            d_out, work.keys, work.queries, gates, norm, work.W, work.S, scan.base, self.begin, network
        )
        bends = dual.Bends.of(work.keys, ends, norm, network)
        parts = each([work.keys, work.aim, bends, ends, read.X, read.G, work.queries.Z, read.A_dz, read.B_dz], count)
        frozen = []
        for n, W in zip(blocks, each(work.W, count), strict=True):
            F = scan.frozen(n, W, F)
            frozen.append(F)

        after = [w.new_empty(count, *w.shape) for w in self.now]
        slots = [tuple(torch.empty_like(w) for w in self.now), *zip(*(w.unbind() for w in after), strict=True)]
        for slot, w in zip(slots[-1], self.now, strict=True):
            slot.copy_(w)
        writes = []
        for i in reversed(range(count)):
            keys, aim, bend, end, dX, dG, Z, A_dz, B_dz = parts[i]
            new_W, new_S = slots[i + 1][:layers], slots[i + 1][layers:]
            dW, dS = slots[i][:layers], slots[i][layers:]
            dual.state_backward(new_W, new_S, end, Z, A_dz, B_dz, (dW, dS))
            # If no other block's gradients are taken at these weights, their gradient goes directly into dW.
            alone = scan.plan.new_chunk[blocks[i]] is True and scan.base is None and self.F[0] is None
            dF = list(dW) if alone else self.F
            HW, HS = dual.write_backward(keys, bend, dX, dG, new_W, new_S, end)
            written = dual.key_side_backward(keys, aim, bend, dX, dG, scan.norm, frozen[i], dF, network, scan.plan.rule)
            writes.append([written, HW, HS])
            if not alone:
                self._thaw(scan.plan.new_chunk[blocks[i]], dW)
            self._forget(scan.plan.new_document[blocks[i]], slots[i])
        self.now = slots[0]
        self._sum(blocks, read, joined(writes[::-1]), work, [w.flatten(0, 1) for w in after])

    def _thaw(self, chunk: Flag, dW: Weights):
        """Add the gradient of a chunk's frozen weights to the gradient of the first block's starting weights."""
        if chunk is False:
            return
        sums = [f for f in self.F if f is not None]  # all layers': a block has just added to each
        part = sums if chunk is True else [f.where(chunk.view(-1, 1, 1), 0) for f in sums]
        for w, f in zip(dW, part, strict=True):
            w += f
        if self.scan.base is not None:
            self._to_begin(part)
        self.F = [None if chunk is True else f - p for f, p in zip(sums, part, strict=True)]

    def _forget(self, document: Flag, now: Weights):
        """Stop gradients where a document begins: it does not depend on anything before."""
        if document is False:
            return
        rows = torch.ones_like(now[0][:, :1, :1], dtype=torch.bool) if document is True else document.view(-1, 1, 1)
        if self.scan.base is None:
            self._to_begin([w.where(rows, 0) for w in now[: len(now) // 2]])
        for w in now:
            w.masked_fill_(rows, 0)

    def _to_begin(self, parts: list[Tensor]):
        for total, part in zip(self.begin, parts, strict=True):
            total += part

    def _sum(self, blocks: range, read: dual.ReadGradients, writes: list, work: _Work, after: list[Tensor]):
        """Compute the gradients that need no order, for all blocks at once. writes: dual.Writes and the result of
        dual.write_backward. after: gradients of W and S after each block."""
        write, HW, HS = writes
        network, layers, place = self.scan.plan.network, len(work.W), slice(blocks.start, blocks.stop)

        def of_blocks(x: Tensor) -> Tensor:
            return x.unflatten(0, (len(blocks), -1))

        self.q[place] = of_blocks(read.q)
        self.v[place] = of_blocks(-write.error if write.v is None else write.v - write.error)
        self.k[place] = of_blocks(write.k + write.error if network.residual else write.k)
        for total, part in zip(self.own, write.own, strict=True):
            total[place] = of_blocks(part)
        for n in range(layers):
            G, W, S, dW, dS = work.keys.G[n], work.W[n], work.S[n], after[n], after[layers + n]
            read.A[n][:, -1:].add_(_inner(dW, W))
            read.B[n][:, -1:].add_(_inner(dW, S))
            read.mix[n][:, -1].sub_((G * HW[n]).sum(-1))
            d_e = (G * HS[n]).sum(-1, keepdim=True).neg_()
            parts = read.A[n], read.B[n], read.mix[n], _inner(dS, S), d_e
            for total, part in zip(self.coefficients, parts, strict=True):
                total[min(n, len(total) - 1), place].add_(of_blocks(part))
        if work.keys.norm is not None:
            weight = torch.addcmul(write.upstream * work.keys.top, write.error, work.keys.norm.unit)
            of_keys = [x.sum(1, keepdim=True) for x in (weight, write.error)]
            for total, x, y in zip(self.norm, read.norm, of_keys, strict=True):
                total += of_blocks(x + y).sum(0)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Sums of products of two tensors (M, d, h) -> (M, 1, 1), without a temporary tensor of their size."""
    return torch.bmm(x.flatten(1).unsqueeze(1), y.flatten(1).unsqueeze(2))
