"""The exact dual form: matrix products over blocks of tokens, no weight set per token.

With the gradients of a chunk frozen at its start, (M_t, S_t) is a linear recurrence in known rank-one terms
u_i = x_i g_i^T. Unrolled over a block that starts at (W, S), with a = 1 - alpha:

    M_t = A_t W + B_t S - sum_{i<=t} P[t, i] theta_i u_i       S_t = m_t S - sum_{i<=t} E[t, i] theta_i u_i
    D[t, j] = prod_{j<l<=t} a_l     E[j, i] = prod_{i<l<=j} eta_l     P = D E
    A_t = prod_{l<=t} a_l           m_t = prod_{l<=t} eta_l           B = D m

so a layer applied to queries Z needs (Z X^T * P theta) G instead of M_t. A block may be shorter than the gradient
chunk: its keys still meet ``chunk_weights``, its queries the running ones. Products of gates are cumulative products,
never quotients or logarithms: gates of exactly 0 and 1 are ordinary.

Backward: the state at every ``save_every``-th block is kept, the blocks between are computed again.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.memory import mlp
from kernels.memory.blocks import Blocks, cut
from kernels.memory.state import MemoryState, Weights

MAX_BLOCK = 64
"""Tokens of a compute block at most: the (block x block) products then stay small whatever the gradient chunk."""


def chunked_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    weights: Weights,
    *,
    norm: Weights | None,
    residual: bool,
    activation: str,
    chunk_size: int,
    state: MemoryState,
    reset: Tensor | None,
    save_every: int,
) -> tuple[Tensor, MemoryState]:
    """Arguments as in :func:`kernels.memory.naive.naive_memory`.

    Memory beyond inputs and outputs: one (W, S, chunk W) per ``save_every`` blocks for the backward pass, and the
    intermediates of ``save_every`` blocks.
    """
    batch, length, heads = q.shape[:3]
    layers = len(weights)
    blocks = cut(state.offset, reset, length, chunk_size, min(chunk_size, MAX_BLOCK))

    def fold(tensors: Weights) -> Weights:
        return tuple(w.reshape(batch * heads, *w.shape[2:]) for w in tensors)

    begin = fold(weights) if reset is not None else ()
    affine = () if norm is None else tuple(p.reshape(batch * heads, 1, -1) for p in norm)
    carry = (*fold(state.weights), *fold(state.momentum), *fold(state.chunk_weights))
    streams = (q, k, v, theta, eta, alpha)
    outputs = []
    for first, last, tokens in _groups(blocks, save_every):
        step = _Group(blocks, first, last, tokens, layers, bool(affine), residual, activation, heads)
        arguments = (*streams, *carry, *affine, *begin)
        if torch.is_grad_enabled() and any(t.requires_grad for t in arguments):
            out, *carry = checkpoint(
                step, *arguments, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        else:
            out, *carry = step(*arguments)
        outputs.append(out)

    parts = [tuple(w.view(batch, heads, *w.shape[1:]) for w in carry[n * layers : (n + 1) * layers]) for n in range(3)]
    ended = (blocks.offset == 0).to(q.device)
    fresh = tuple(_where(ended, new, old) for new, old in zip(parts[0], parts[2], strict=True))
    return _join(outputs, blocks, length), MemoryState(parts[0], parts[1], fresh, blocks.offset)


def _groups(blocks: Blocks, save_every: int):
    """(first block, one past the last, token range) of runs of equally long blocks."""
    first = t = 0
    while first < len(blocks.lengths):
        last = first + 1
        while last < len(blocks.lengths) and last - first < save_every and blocks.lengths[last] == blocks.lengths[first]:
            last += 1
        end = t + blocks.lengths[first] * (last - first)
        yield first, last, slice(t, end)
        first, t = last, end


def _join(outputs: list[Tensor], blocks: Blocks, length: int) -> Tensor:
    """Per group (B, n, c, H, D) -> (B, T, H, D)."""
    out = torch.cat([o.flatten(1, 2) for o in outputs], 1)
    if blocks.index is None:
        return out
    index, valid = blocks.index.flatten(1), blocks.valid.flatten(1)
    place = torch.zeros(index.shape[0], length, dtype=torch.int64)
    row, slot = valid.nonzero(as_tuple=True)
    place[row, index[row, slot]] = slot
    return torch.take_along_dim(out, place.to(out.device)[:, :, None, None], 1)


def _where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition.view(-1, *[1] * (yes.dim() - 1)), yes, no)


class _Group:
    """A run of blocks as one function of tensors, so that the backward pass can compute it again."""

    def __init__(self, blocks, first, last, tokens, layers, has_norm, residual, activation, heads):
        self.blocks, self.first, self.last, self.tokens = blocks, first, last, tokens
        self.layers, self.has_norm, self.residual, self.activation = layers, has_norm, residual, activation
        self.heads = heads

    def __call__(self, q, k, v, theta, eta, alpha, *rest):
        layers = self.layers
        carry, rest = rest[: 3 * layers], rest[3 * layers :]
        norm, begin = (rest[:2], rest[2:]) if self.has_norm else (None, rest)
        q, k, v, theta, eta, alpha = (self._fold(x) for x in (q, k, v, theta, eta, alpha))
        coefficients = _coefficients(*(g.movedim(-1, 0) for g in (theta, eta, alpha)), self._valid(q.device))
        outputs = []
        for n in range(self.last - self.first):
            carry = self._boundaries(self.first + n, carry, begin)
            gates = [[c[min(layer, len(c) - 1), n] for c in coefficients] for layer in range(layers)]
            out, carry = self._block(q[n], k[n], v[n], gates, carry, norm)
            outputs.append(out)
        out = torch.stack(outputs)  # (n, B H, c, D)
        out = out.view(len(outputs), -1, self.heads, *out.shape[2:])
        return out.permute(1, 0, 3, 2, 4), *carry

    def _fold(self, x: Tensor) -> Tensor:
        """(B, T, H, F) -> (n, B H, c, F), the tokens of this group's blocks."""
        n = self.last - self.first
        if self.blocks.index is None:
            x = x[:, self.tokens].unflatten(1, (n, -1))
        else:
            index = self.blocks.index[:, self.first : self.last].to(x.device)
            x = torch.take_along_dim(x, index.flatten(1)[:, :, None, None], 1).unflatten(1, index.shape[1:])
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _valid(self, device) -> Tensor | None:
        if self.blocks.valid is None:
            return None
        valid = self.blocks.valid[:, self.first : self.last].to(device)
        return valid.transpose(0, 1).repeat_interleave(self.heads, 1)

    def _boundaries(self, block: int, carry, begin):
        """Starts documents at M_0, S_0 = 0 and chunks at the running weights, in the rows where they start."""
        layers = self.layers
        weights, momentum, start = (carry[i * layers : (i + 1) * layers] for i in range(3))
        document, chunk = self.blocks.new_document[block], self.blocks.new_chunk[block]
        if document is not False:
            weights = self._pick(document, begin, weights)
            momentum = self._pick(document, tuple(torch.zeros_like(s) for s in momentum), momentum)
        if chunk is not False:
            start = self._pick(chunk, weights, start)
        return (*weights, *momentum, *start)

    def _pick(self, condition, yes, no):
        if condition is True:
            return yes
        condition = condition.repeat_interleave(self.heads).to(yes[0].device)
        return tuple(_where(condition, a, b) for a, b in zip(yes, no, strict=True))

    def _block(self, q, k, v, gates, carry, norm):
        """One block: q, k, v (N, c, D), N = B H; gates per layer (A, B, P theta, last rows); carry 3 L weights."""
        layers = self.layers
        weights, momentum, start = (carry[i * layers : (i + 1) * layers] for i in range(3))
        act = mlp.ACTIVATIONS[self.activation]
        inputs, errors = mlp.inner_gradient(k, v, start, norm, self.residual, self.activation)
        z, new_weights, new_momentum = q, [], []
        for w, s, x, g, (past_w, past_s, mix, last_a, last_b, last_m, last_p, last_e) in zip(
            weights, momentum, inputs, errors, gates, strict=True
        ):
            if new_weights:
                z = act(z)
            z = past_w * (z @ w) + past_s * (z @ s) - ((z @ x.transpose(1, 2)) * mix) @ g
            xt = x.transpose(1, 2)
            new_weights.append(torch.baddbmm(last_a * w + last_b * s, xt, last_p * g, alpha=-1))
            new_momentum.append(torch.baddbmm(last_m * s, xt, last_e * g, alpha=-1))
        return mlp.finish(z, q, norm, self.residual), (*new_weights, *new_momentum, *start)


def _coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
    """Gates (G, n, N, c), valid (n, N, c) or None -> what a block needs, for every block at once.

    Returns A, B (G, n, N, c, 1), P theta (.., c, c), A, B, m at the last token (.., 1, 1), and the last rows of
    P theta and E theta as columns (.., c, 1). A token that is not valid changes nothing.
    """
    keep = 1 - alpha
    if valid is not None:
        theta, eta, keep = (torch.where(valid, g, float(fill)) for g, fill in ((theta, 0), (eta, 1), (keep, 1)))
    decay_m, decay_s = _products(keep), _products(eta)
    m = torch.cumprod(eta, -1).unsqueeze(-1)
    a = torch.cumprod(keep, -1).unsqueeze(-1)
    to_m = decay_m if valid is None else decay_m * valid.unsqueeze(-2)
    b = to_m @ m
    mix = (to_m @ decay_s) * theta.unsqueeze(-2)
    ends = a[..., -1:, :], b[..., -1:, :], m[..., -1:, :]
    return a, b, mix, *ends, mix[..., -1, :, None], (decay_s[..., -1, :] * theta)[..., None]


def _products(gate: Tensor) -> Tensor:
    """(.., c) -> (.., c, c): prod_{i<l<=t} gate_l at [t, i] for i <= t, else 0."""
    c = gate.shape[-1]
    below = torch.ones(c, c, dtype=torch.bool, device=gate.device).tril(-1)
    factors = torch.where(below, gate.unsqueeze(-1), 1.0)
    return torch.cumprod(factors, -2).tril()
