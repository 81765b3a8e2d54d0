"""The recurrence block by block, in PyTorch's operators and autograd, for the variants without a formula in chunked.py.

Stale reads
    Tokens do not see the writes of their own chunk. The chunk's queries are one pass through the network, its keys
    another, and its write is a sum over the chunk, M' = a M + b S - sum_i p_i u_i and S' = m S - sum_i e_i u_i (letters
    as in coefficients.py). This is the global memory of TNT (arXiv 2511.07343, Eq. 5), which has no momentum and no
    forgetting, and is close to LaCT (2505.23884).

Rules that are not linear
    The writes of a chunk's tokens accumulate in M by the same sum. At the chunk's end M = closed(M, S); keys and
    queries of the next chunk use met(M), as above.

An alpha for each channel, windows, features, erasing
    See channels.py, window.py and erasure.py. Features are the first matrix's input for a key or query.

Authors
    An author (call.py) makes a block's keys, values and gates from the answers of the chunk's starting memory to the
    block's queries. The rest of the chunk is as above; the next chunk has to wait for it, as without an author.

Backward pass: runs of ``save_every`` blocks are recomputed; the state between runs is kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titans_pt.kernels.blocks import Flag, Layout, cut, join, runs
from titans_pt.kernels.memory import mlp, native
from titans_pt.kernels.memory.call import Backend, MemoryCall, for_each
from titans_pt.kernels.memory.channels import CHANNELWISE_BLOCK, ChannelCoefficients, channel_coefficients
from titans_pt.kernels.memory.chunked import MAX_BLOCK, in_c
from titans_pt.kernels.memory.coefficients import Coefficients
from titans_pt.kernels.memory.dual import Aim, Keys, key_side
from titans_pt.kernels.memory.erasure import Decay, Erasing, erasing
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Own, Rule
from titans_pt.kernels.memory.scan import ScanPlan
from titans_pt.kernels.memory.soup import Soup
from titans_pt.kernels.memory.state import MemoryState, Weights, choose
from titans_pt.kernels.memory.tree import leaves, rebuilt
from titans_pt.kernels.memory.window import Recent, band, followed

OfLayer = Coefficients | ChannelCoefficients
"""Coefficients of one block for one layer."""


def blockwise_memory(call: MemoryCall, compiled: bool = False) -> tuple[Tensor, MemoryState]:
    """Outputs (B, T, H, D) and the state after them.

    Memory beyond inputs and outputs: the state (three weight sets) per ``save_every`` blocks, and autograd's tensors
    for ``save_every`` blocks. None: the square root of the number of blocks.

    compiled: run each block with native.NativeScan; non-linear steps still use PyTorch's operators.
    """
    call = call.of_rows()
    assert call.state is not None
    batch, length, heads = call.q.shape[:3]
    sums = call.reads_start and not call.rule.erases
    longest = CHANNELWISE_BLOCK if call.channelwise else call.chunk_size if sums else MAX_BLOCK
    size = min(call.chunk_size, longest)
    blocks = cut(call.state.offset, call.reset, length, call.chunk_size, size)
    device = call.q.device

    def fold(tensors: Weights) -> Weights:
        return tuple(w.reshape(batch * heads, *w.shape[2:]) for w in tensors)

    def unfold(tensors: Weights) -> Weights:
        return tuple(w.view(batch, heads, *w.shape[1:]) for w in tensors)

    begin = fold(call.weights)
    affine = () if call.norm is None else tuple(p.reshape(batch * heads, 1, -1) for p in call.norm)
    soup = call.soup and Soup(tuple(map(fold, call.soup.weights)), call.soup.shares)
    scan = _Scan(call, affine, begin, soup, compiled)
    shares = () if soup is None else (soup.shares.to(call.q.dtype),)
    W, S, frozen = fold(call.state.weights), fold(call.state.momentum), fold(call.state.chunk_weights)
    if call.to_start:
        W = minus(W, begin)
    outputs, recent = [], tuple(x.flatten(0, 1) for x in call.state.recent)
    for first, last, tokens in runs(blocks):
        layout = Layout(blocks, first, last, tokens, heads)
        written = () if call.author else (call.k, call.v, call.theta, call.eta, call.alpha, *call.own)
        tensors = [layout.fold(x) for x in (call.q, *written, *shares)]
        valid = layout.valid(device)
        flags = [layout.rows(f, device) for f in (blocks.new_chunk, blocks.new_document, blocks.ends_chunk)]
        every, parts = call.save_every or math.isqrt(layout.count), []
        run = _kept if every == 1 else _recomputed
        # split, not indexing: the gradient of an index has the size of all blocks.
        for begins, *part in zip(range(0, layout.count, every), *(x.split(every) for x in tensors), strict=True):
            here = slice(begins, begins + every)
            there = None if valid is None else valid[here]
            out, W, S, frozen, recent = run(scan, there, [f[here] for f in flags], (part, W, S, frozen, recent))
            parts.append(out)
        outputs.append(layout.unfold(torch.cat(parts)))

    if call.to_start:
        W = plus(W, begin)
    # A chunk that is complete ends here: the next one starts at the current weights.
    if not call.rule.nonlinear:
        frozen = choose((blocks.offset == 0).repeat_interleave(heads).tolist(), W, frozen)
    return join(outputs, blocks, length), MemoryState(
        unfold(W), unfold(S), unfold(frozen), blocks.offset, unfold(recent)
    )


def _kept(scan: "_Scan", valid: Tensor | None, flags: list[list[Flag]], given: tuple) -> tuple:
    """Run blocks and keep all intermediates for the backward pass."""
    tensors, *state = given
    return scan.blocks(tensors, valid, flags, *state)


def _recomputed(scan: "_Scan", valid: Tensor | None, flags: list[list[Flag]], given: tuple) -> tuple:
    """Run blocks and keep only their inputs for the backward pass. Each tensor is a separate argument: torch's hooks,
    with which plans measure memory, do not see tensors inside lists."""

    def run(*flat: Tensor) -> tuple:
        tensors, *state = rebuilt(given, iter(flat))
        return scan.blocks(tensors, valid, flags, *state)

    return checkpoint(run, *leaves(given), use_reentrant=False, preserve_rng_state=False)


def plus(a: Weights, b: Weights) -> Weights:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Weights, b: Weights) -> Weights:
    return tuple(x - y for x, y in zip(a, b, strict=True))


@dataclass
class _Writes:
    """Writes of one block's tokens: k, v (N, c, D), theta (N, c, 1 or L), own gates (N, c, 1), and for each layer its
    coefficients and, if the rule erases, its decays."""

    k: Tensor
    v: Tensor
    theta: Tensor
    own: Own
    coefficients: tuple[OfLayer, ...]
    decays: tuple[Decay, ...]


class _Scan:
    """The recurrence over blocks, of N = B H rows.

    norm: two (N, 1, D), or none. begin: M_0, L tensors (N, d_in, d_out). With forget_to="start" W is the difference to
    M_0, forgotten to zero, and queries use M_0 + W.
    """

    def __init__(self, call: MemoryCall, norm: Weights, begin: Weights, soup: Soup | None, compiled: bool):
        self.soup, self.compiled = soup, compiled
        self.network, self.rule, self.channelwise = call.network, call.rule, call.channelwise
        self.author, self.heads = call.author, call.q.shape[2]
        self.reads_start, self.to_start, self.norm, self.begin = call.reads_start, call.to_start, norm, begin
        self.begin_met = tuple(map(call.rule.met, begin))

    def blocks(
        self, tensors: list[Tensor], valid: Tensor | None, flags: list[list[Flag]], W: Weights, S: Weights,
        frozen: Weights, recent: Recent,
    ) -> tuple[Tensor, Weights, Weights, Weights, Recent]:  # fmt: skip
        """Outputs (n, N, c, D) of n blocks, and the state after them.

        tensors: q, k, v (n, N, c, D), theta, eta, alpha (n, N, c, .), own gates (n, N, c, 1), and a soup's shares; with
            an author q alone.
        valid: (n, N, c), or None if all tokens are valid; invalid tokens change nothing. flags: for each block whether
            a chunk begins, a document begins, a chunk ends: True, False or the rows (N,).
        """
        new_chunk, new_document, ends_chunk = flags
        q, *given = tensors
        shares = given.pop() if self.soup else [None] * len(q)
        written = [None] * len(q) if self.author else self._writes(*given, valid=valid)
        outputs = []
        for n, (q_n, writes) in enumerate(zip(q.unbind(), written, strict=True)):
            if new_document[n] is not False:
                zero = tuple(torch.zeros_like(s) for s in S)
                W = choose(new_document[n], zero if self.to_start else self.begin, W)
                S = choose(new_document[n], zero, S)
                if self.rule.nonlinear:
                    frozen = choose(new_document[n], self.begin_met, frozen)
            if new_chunk[n] is not False and not self.rule.nonlinear:
                frozen = choose(new_chunk[n], plus(W, self.begin) if self.to_start else W, frozen)
            here = None if valid is None else valid[n]
            answers = None
            if writes is None:
                answers = self._answer(q_n, frozen)
                writes = self._authored(answers, frozen, here)
            if self.compiled:
                out, W, S = self._block_in_c(q_n, writes, W, S, frozen)
                outputs.append(out if answers is None else answers)
                if ends_chunk[n] is not False and self.rule.nonlinear:
                    W, frozen = self._closed(ends_chunk[n], _last(writes.own, here), W, S, frozen)
                continue
            c, theta, own = writes.coefficients, writes.theta, writes.own
            if self.rule.window > 1:
                tokens = [writes.k, writes.v, *own]
                keys, c, recent = self._windowed(tokens, theta, c, frozen, recent, new_document[n], here)
            else:
                keys = self._keys(writes.k, writes.v, own, frozen)
            if self.rule.erases:
                c = self._erasing(keys, c, writes.decays, theta, W, S)
            if answers is None:
                answers = self._read(q_n, shares[n], partial(self._running, keys, c, W, S, frozen))
            outputs.append(answers)
            each_layer = zip(c, keys.X, keys.G, W, S, strict=True)
            W, S = zip(*(of.after(x, g, w, s) for of, x, g, w, s in each_layer), strict=True)
            if ends_chunk[n] is not False and self.rule.nonlinear:
                last = _last(own, here)
                W, frozen = self._closed(ends_chunk[n], last, W, S, frozen)
        return torch.stack(outputs), W, S, frozen, recent

    def _block_in_c(
        self, q: Tensor, writes: _Writes, W: Weights, S: Weights, frozen: Weights
    ) -> tuple[Tensor, Weights, Weights]:
        """Outputs of a block that reads its chunk's start, (N, c, D), and W and S after it."""
        layers, count = self.network.depth, writes.theta.shape[-1]  # gates: one for all layers, or one each

        def stacked(each: list[tuple[Tensor, ...]]) -> list[Tensor]:
            return [torch.stack(x).unsqueeze(1) for x in zip(*each, strict=True)]

        given, erasing = stacked([tuple(vars(c).values()) for c in writes.coefficients[:count]]), []
        if self.rule.erases:
            decays = stacked([(decay.keep.squeeze(-1), decay.reach) for decay in writes.decays[:count]])
            erasing = [writes.theta.movedim(-1, 0).unsqueeze(1), *decays]
        tokens = (x.unsqueeze(0) for x in (q, writes.k, writes.v))
        threshold = (gate.unsqueeze(0) for gate in writes.own[: native.thresholds(self.rule)])
        plan = ScanPlan(
            [False], [False], self.network, self.rule, False, count, 1, torch.is_grad_enabled(), at_start=True,
            silent=self.author is not None,
        )  # fmt: skip
        found = native.scan(plan, *tokens, *given, *threshold, *erasing, *self.norm, *W, *S, *frozen)
        return found[0].squeeze(0), found[1 : 1 + layers], found[1 + layers : 1 + 2 * layers]

    def _writes(
        self, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, *own: Tensor, valid: Tensor | None
    ) -> list[_Writes]:
        """Writes of n blocks, from tensors (n, N, c, .); gates may have fewer rows, see :data:`call.Author`."""
        rows = k.shape[1]
        if valid is not None:
            valid = valid[:, :: rows // theta.shape[1]]
        windowed, erases = self.rule.window > 1, self.rule.erases
        # A window's band contains theta, and a rule that erases has its own step: both are applied block by block.
        given = (torch.ones_like(theta) if windowed or erases else theta, eta, alpha)
        layers = list(zip(*(self.network.per_layer(gate) for gate in given), strict=True))
        each_layer = layers[: alpha.shape[-1]]
        found: list[Sequence[OfLayer]]
        if self.channelwise:
            found = [channel_coefficients(theta_n, eta_n, alpha_n, valid) for theta_n, eta_n, alpha_n in each_layer]
        else:
            make = of_last_token if self.reads_start and not erases else of_all_tokens
            found = [make(self.rule, theta_n, eta_n, alpha_n, own, valid) for theta_n, eta_n, alpha_n in each_layer]
        if theta.shape[1] < rows:  # after the coefficients, which neighbouring heads share
            found = [[_for_each(block, rows) for block in layer] for layer in found]
            theta, *expanded = (for_each(gate, rows) for gate in (theta, *own))
            own = tuple(expanded)
        # For each block, the coefficients of its layers. unbind, not indexing: an index's gradient spans all blocks.
        coefficients = list(zip(*(found if len(found) == len(layers) else found * len(layers)), strict=True))
        decays = _decays(self.network, alpha, valid, rows) if erases else [()] * len(k)
        owns = list(zip(*(gate.unbind() for gate in own), strict=True)) or [()] * len(k)
        each = zip(k.unbind(), v.unbind(), theta.unbind(), owns, coefficients, decays, strict=True)
        return [_Writes(*block) for block in each]

    def _authored(self, answers: Tensor, frozen: Weights, valid: Tensor | None) -> _Writes:
        """Writes of a block by its author, from the memory's answers (N, c, D) to its queries."""
        assert self.author is not None

        def split(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, self.heads))

        made = self.author(split(answers), lambda x: split(self._answer(x.flatten(0, 1), frozen)))
        block = (x.flatten(0, 1).unsqueeze(0) for x in made)
        (writes,) = self._writes(*block, valid=None if valid is None else valid.unsqueeze(0))
        return writes

    def _answer(self, x: Tensor, frozen: Weights) -> Tensor:
        """M(x) at the chunk's start, (N, c, D)."""
        if self.compiled:
            return native.answer(self.network, x, *self.norm, *frozen)
        return mlp.forward(x, frozen, self.norm or None, self.network, self.rule.features(x))

    def _keys(self, k: Tensor, v: Tensor, own: Own, frozen: Weights) -> Keys:
        aim = Aim.of(k, v, own, self.norm, self.network)
        return key_side(self.rule.features(k), aim, self.norm, frozen, self.network, self.rule)

    def _erasing(
        self, keys: Keys, c: tuple[OfLayer, ...], decays: tuple[Decay, ...], theta: Tensor,
        W: Weights, S: Weights,
    ) -> tuple[Erasing, ...]:  # fmt: skip
        """Coefficients of each layer that erases. theta: (N, c, 1 or L). c: coefficients for theta = 1."""
        layers = zip(c, decays, self.network.per_layer(theta), keys.X, keys.G, W, S, strict=True)
        return tuple(erasing(self.rule, *layer) for layer in layers)

    def _windowed(
        self, tokens: list[Tensor], theta: Tensor, c: tuple[OfLayer, ...], frozen: Weights,
        recent: Recent, begins: Flag, valid: Tensor | None,
    ) -> tuple[Keys, tuple[OfLayer, ...], Recent]:  # fmt: skip
        """Keys of a block and of the earlier tokens in its window, coefficients for these keys, the window after it.

        tokens: k, v, own gates, (N, c, .) each. theta: (N, c, 1 or L). c: coefficients for theta = 1. begins: whether
        a document begins (True, False or the rows), whose window excludes all tokens before the block.
        """
        there, *kept = recent
        if begins is not False:
            there = choose(begins, (torch.zeros_like(there),), (there,))[0]
        shares = self.rule.shares(tuple(tokens[2:]))
        bands = [band(gate * shares, there) for gate in self.network.per_layer(theta)]
        k, v, *own = (torch.cat([old, x], 1) for old, x in zip(kept, tokens, strict=True))
        keys = self._keys(k, v, tuple(own), frozen)
        after = followed((there, *kept), tokens, valid)
        return keys, tuple(each.through(b) for each, b in zip(c, bands, strict=True)), after

    def _closed(self, rows: Flag, own: Own, W: Weights, S: Weights, frozen: Weights) -> tuple[Weights, Weights]:
        """W and the next chunk's frozen weights, after a chunk that ended in ``rows``. own: gates of its last token."""
        whole = plus(W, self.begin) if self.to_start else W
        before, whole = whole, tuple(self.rule.closed(w, s, own) for w, s in zip(whole, S, strict=True))
        for w, closed in zip(before, whole, strict=True):
            if getattr(closed, "shape", None) != w.shape:
                raise TypeError(f"{type(self.rule).__name__}.closed: returned {getattr(closed, 'shape', closed)} for "
                                f"weights {tuple(w.shape)}; must be a new tensor of their shape")  # fmt: skip
        after = minus(whole, self.begin) if self.to_start else whole
        return choose(rows, after, W), choose(rows, tuple(map(self.rule.met, whole)), frozen)

    def _read(self, q: Tensor, shares: Tensor | None, running: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Read the memory with queries (N, c, D), or several memories with the soup's ``shares`` (N, c, 1 + n).

        running: (layer, its inputs) -> output of the running memory's layer.
        """
        act, z = mlp.ACTIVATIONS[self.network.activation], self.rule.features(q)
        for layer in range(self.network.depth):
            z = act(z) if layer else z
            seen = running(layer, z)
            z = seen if self.soup is None or shares is None else self.soup.layer(layer, z, seen, shares)
        return mlp.finish(z, q, self.norm or None, self.network)

    def _running(
        self, keys: Keys, coefficients: tuple[OfLayer, ...], W: Weights, S: Weights,
        frozen: Weights, layer: int, z: Tensor,
    ) -> Tensor:  # fmt: skip
        """Output of a layer for inputs z, with each token's M_t or the weights of the chunk's start."""
        if self.reads_start:
            return z @ frozen[layer]
        seen = coefficients[layer].seen(z, keys.X[layer], keys.G[layer], W[layer], S[layer])
        return seen + z @ self.begin[layer] if self.to_start else seen


def _last(own: Own, valid: Tensor | None) -> Own:
    """Own gates (N, c, 1) each -> the gates of a block's last token, (N, 1, 1)."""
    if valid is None:
        return tuple(gate[:, -1:] for gate in own)
    at = (valid.sum(-1) - 1).clamp(min=0)[:, None, None]
    return tuple(gate.take_along_dim(at, 1) for gate in own)


def _for_each(made: Any, rows: int) -> Any:
    """Expand a block's Coefficients or Decay to ``rows`` rows."""
    return replace(made, **{name: for_each(x, rows, 0) for name, x in vars(made).items()})


def _decays(network: NetworkShape, alpha: Tensor, valid: Tensor | None, rows: int) -> list[tuple[Decay, ...]]:
    """Decays of each block, one per layer, for ``rows`` keys' rows. alpha: (n, N, c, 1 or L)."""
    gates = network.per_layer(alpha)[: alpha.shape[-1]]
    found = [[_for_each(block, rows) for block in Decay.of(gate, valid)] for gate in gates]
    return list(zip(*(found * (network.depth // len(found))), strict=True))


def of_all_tokens(
    rule: Rule, theta: Tensor, eta: Tensor, alpha: Tensor, own: Own, valid: Tensor | None
) -> list[Coefficients]:
    """Coefficients of n blocks of at most MAX_BLOCK tokens. theta, eta, alpha, own: (n, N, c, 1); valid: (n, N, c)."""
    theta, eta, alpha = (gate.squeeze(-1).unsqueeze(0) for gate in (theta, eta, alpha))
    found = (x.squeeze(0).unbind() for x in rule.coefficients(theta, eta, alpha, own, valid))
    return [Coefficients(*block) for block in zip(*found, strict=True)]


def of_last_token(
    rule: Rule, theta: Tensor, eta: Tensor, alpha: Tensor, own: Own, valid: Tensor | None
) -> list[Coefficients]:
    """The last token's row of coefficients of n blocks of any length. theta, eta, alpha, own: (n, N, c, 1); valid:
    (n, N, c) or None.

    Computes the rule's coefficients in pieces of MAX_BLOCK tokens and joins them from the last piece backward: for a
    longer block all products would be c x c numbers.
    """
    n, rows, c = theta.shape[:3]
    size = min(c, MAX_BLOCK)
    pieces = -(-c // size)
    missing = pieces * size - c
    if missing and valid is None:
        valid = torch.ones(n, rows, c, dtype=torch.bool, device=theta.device)

    def pieced(x: Tensor) -> Tensor:
        """(n, N, c) -> (n pieces, N, size)."""
        return F.pad(x, (0, missing)).unflatten(-1, (pieces, size)).transpose(1, 2).flatten(0, 1)

    theta, eta, alpha = (pieced(gate.squeeze(-1)).unsqueeze(0) for gate in (theta, eta, alpha))
    own = tuple(pieced(gate.squeeze(-1)).unsqueeze(-1) for gate in own)
    found = rule.coefficients(theta, eta, alpha, own, None if valid is None else pieced(valid))
    A, B, mix, m, e = (x.squeeze(0).unflatten(0, (n, pieces)).unbind(1) for x in found)
    one = torch.ones_like(m[0])
    a, b, momentum, p, into_s = one, torch.zeros_like(one), one, [], []
    for piece in range(pieces - 1, -1, -1):
        p.append(a * mix[piece][..., -1:, :] + b * e[piece].mT)
        into_s.append(momentum * e[piece])
        a, b = a * A[piece][..., -1:, :], a * B[piece][..., -1:, :] + b * m[piece]
        momentum = momentum * m[piece]
    mix, e = torch.cat(p[::-1], -1)[..., :c], torch.cat(into_s[::-1], -2)[..., :c, :]
    return [Coefficients(*block) for block in zip(*(x.unbind() for x in (a, b, mix, momentum, e)), strict=True)]


def _unserved(call: MemoryCall) -> str | None:
    if call.channelwise and type(call.rule).coefficients is not Rule.coefficients:
        return f"alpha has one value per channel, and the rule {call.rule.name} moves M its own way"
    if call.channelwise and call.rule.erases:
        return f"alpha has one value per channel, and the rule {call.rule.name} erases whole matrices"
    own = call.channelwise or call.reads_start or call.soup or not call.rule.plain
    return None if own else "chunked.py serves it, faster"


def _in_c(call: MemoryCall) -> str | None:
    if not call.rule.nonlinear and call.author is None:
        return "chunked.py serves it, faster"
    if call.rule.window > 1:
        return f"the memory rule is {call.rule.name}, with a window (model.memory.rule)"
    return in_c(call)


BLOCKWISE = Backend(_unserved, blockwise_memory)
NATIVE_BLOCKS = Backend(_in_c, partial(blockwise_memory, compiled=True))
