"""The definition, token by token: the reference that every other implementation is tested against.

Titans (arXiv 2501.00663), Eq. 11-14 with chunk-wise gradients (Section 3.2):

    u_t = grad_W loss(M_{t'}(k_t), v_t)      at the weights of the start of t's chunk, by autograd; ||.||^2 in Titans
    S_t = eta_t S_{t-1} - theta_t u_t
    M_t = (1 - alpha_t) M_{t-1} + S_t        forget_to="zero", the paper's
    M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t        forget_to="start"
    y_t = M_t(q_t)                           stale: M_{t'}(q_t), the weights of the start of t's chunk

A rule with a window takes the gradient of a weighted sum: the losses of its tokens, each times its share (Rule.shares).

A rule that erases has (I - b_t x x^T) M_{t-1} in place of M_{t-1} ("start": of M_{t-1} - M_0). x is a layer's input for
k_t at the weights of the chunk's start; Rule.steps gives b_t and the layer's theta.

A non-linear rule closes every chunk: after the last token M becomes closed(M, S). In the next chunk gradients are taken
at the weights met(M), and queries read them.

With an author (call.py; the mixer hope), k_t, v_t and the gates are computed from M_{t'}(q_t) and further reads of
M_{t'}. u_t is then the gradient in the weights that k_t passes through; v_t counts as a constant.

alpha is one number per matrix, or one per row (channel of d_in): (1 - alpha_t) is then a diagonal matrix to the left of
M_{t-1}, in x @ M. The rule defines the loss and the updates of S and M.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titans_pt.kernels.common import recordable, recording
from titans_pt.kernels.memory import mlp
from titans_pt.kernels.memory.call import Author, Backend, MemoryCall, for_each
from titans_pt.kernels.memory.rules import Own, Rule
from titans_pt.kernels.memory.state import MemoryState, Weights, choose
from titans_pt.kernels.memory.window import Recent


def naive_memory(
    call: MemoryCall, observe: Callable[[Weights, Weights, Weights, Weights], Any] | None = None
) -> tuple[Tensor, MemoryState]:
    """Outputs (B, T, H, D) and the state after them.

    observe: called after each token with u_t, M_t and S_t, each L tensors (B, H, d_in, d_out), and theta_t, eta_t and
        alpha_t, (B, H, 1 or L; channels) each.
    """
    call = call.of_rows()
    q, weights, network, state, rule = call.q, call.weights, call.network, call.state, call.rule
    assert state is not None
    keep_graph = torch.is_grad_enabled()
    current, momentum, start = state.weights, state.momentum, state.chunk_weights
    origin = weights if call.to_start else tuple(torch.zeros_like(w) for w in weights)
    offset, recent = state.offset.to(q.device), state.recent
    reset = None if call.reset is None else call.reset.to(q.device)
    outputs = []
    for t in range(q.shape[1]):
        if reset is not None:
            begins = reset[:, t]
            current = choose(begins, weights, current)
            if rule.nonlinear:
                start = choose(begins, tuple(map(rule.met, weights)), start)
            momentum = tuple(torch.where(begins.view(-1, 1, 1, 1), 0.0, s) for s in momentum)
            offset = torch.where(begins, 0, offset)
        if not rule.nonlinear:
            start = choose(offset == 0, current, start)
        if rule.window > 1 and reset is not None:
            recent = (torch.where(begins.view(-1, 1, 1, 1), 0.0, recent[0]), *recent[1:])
        now, at = (call, t) if call.author is None else (_written_by(call.author, call, t, start), 0)
        gradient, recent = _gradient(now, at, start, keep_graph, recent)
        # theta, eta, alpha of each layer, (B, H, 1 or d_in, 1): a row of the matrix is a channel of its inputs.
        of_all = tuple(gate[:, at] for gate in (now.theta, now.eta, now.alpha))
        gates = zip(*map(network.per_layer, of_all), strict=True)
        own = tuple(gate[:, at].unsqueeze(-1) for gate in now.own)
        inputs = _inputs(now, at, start) if rule.erases else [None] * len(start)
        moved = [
            _moved(rule, w - w0, s, u, tuple(gate.unsqueeze(-1) for gate in layer), own, x)
            for w, w0, s, u, layer, x in zip(current, origin, momentum, gradient, gates, inputs, strict=True)
        ]
        current = tuple(w0 + w for w0, (w, _) in zip(origin, moved, strict=True))
        momentum = tuple(s for _, s in moved)
        if observe:
            observe(gradient, current, momentum, of_all)
        outputs.append(_forward(call, q[:, t], _mixed(call, t, start if call.reads_start else current)))
        offset = (offset + 1) % call.chunk_size
        if rule.nonlinear:
            ended = (rule.closed(w, s, own) for w, s in zip(current, momentum, strict=True))
            current = choose(offset == 0, tuple(ended), current)
            start = choose(offset == 0, tuple(map(rule.met, current)), start)
    # A chunk that is complete ends here: the next one starts at the current weights.
    if not rule.nonlinear:
        start = choose(offset == 0, current, start)
    return torch.stack(outputs, 1), MemoryState(current, momentum, start, offset.to(state.offset.device), recent)


def _written_by(author: Author, call: MemoryCall, t: int, weights: Weights) -> MemoryCall:
    """Call of token t alone, with the keys, values and gates that the author makes from the memory's answers."""
    answers = _through(call, call.q[:, t].unsqueeze(-2), weights)
    made = author(answers, lambda x: _through(call, x, weights))
    k, v, theta, eta, alpha, *own = (for_each(x, answers.shape[1]).transpose(1, 2) for x in made)
    return replace(call, q=call.q[:, t : t + 1], k=k, v=v, theta=theta, eta=eta, alpha=alpha, own=tuple(own))


def _moved(
    rule: Rule, weights: Tensor, momentum: Tensor, gradient: Tensor, gates: tuple[Tensor, ...], own: Own,
    x: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """M and S of one layer after a token. x: the layer's input (B, H, 1, d_in) if the rule erases, else None."""
    theta, eta, alpha = gates
    if x is None:
        return rule.update(weights, momentum, gradient, theta, eta, alpha, own)
    found = rule.steps(theta, x)
    assert found is not None
    theta, share = found
    left = weights - share * x.mT @ (x @ weights)
    return rule.update(left, momentum, gradient, theta, eta, alpha, own)


def _inputs(call: MemoryCall, t: int, weights: Weights) -> list[Tensor]:
    """Input of each layer for the key of token t, L of (B, H, 1, d_in)."""
    act, x = mlp.ACTIVATIONS[call.network.activation], [call.rule.features(call.k[:, t].unsqueeze(-2))]
    for w in weights[:-1]:
        x.append(act(x[-1] @ w))
    return x


def _mixed(call: MemoryCall, t: int, weights: Weights) -> Weights:
    """Weights that token t reads: the running memory's, or a mean over several memories."""
    if call.soup is None:
        return weights
    shares = call.soup.shares[:, t, :, None, None].unbind(-1)
    every = zip(weights, *call.soup.weights, strict=True)
    return tuple(sum(share * w for share, w in zip(shares, layer, strict=True)) for layer in every)


def _forward(call: MemoryCall, x: Tensor, weights: Weights) -> Tensor:
    """M(x) of one token, (B, H, D)."""
    return _through(call, x.unsqueeze(-2), weights).squeeze(-2)


def _through(call: MemoryCall, x: Tensor, weights: Weights) -> Tensor:
    """M(x) of n tokens, (B, H, n, D)."""
    affine = None if call.norm is None else tuple(p.unsqueeze(-2) for p in call.norm)
    return mlp.forward(x, weights, affine, call.network, call.rule.features(x))


def _gradient(call: MemoryCall, t: int, weights: Weights, keep_graph: bool, recent: Recent) -> tuple[Weights, Recent]:
    """u_t, and the window's record after token t."""
    rule = call.rule
    token = tuple(x[:, t].unsqueeze(-2) for x in (call.k, call.v, *call.own))  # (B, H, 1, .)
    with recording():
        token, recent = recordable(token), recordable(recent)
        call = replace(call, norm=call.norm and recordable(call.norm))
        # Copies: values may be computed from the same weights, but count as constants.
        weights = tuple(w.clone() for w in weights)
        weights = tuple(w if w.requires_grad else w.requires_grad_() for w in weights)
        if rule.window == 1:
            k, v, *own = token
            loss = rule.loss(_through(call, k, weights) - v, v, tuple(own))
            return torch.autograd.grad(loss.sum(), weights, create_graph=keep_graph), recent
        new = torch.ones_like(token[0][..., :1]), *token
        there, k, v, *own = found = [torch.cat([old, x], -2) for old, x in zip(recent, new, strict=True)]
        share = there * rule.shares(tuple(token[2:])).flip(-1).mT
        loss = share.squeeze(-1) * rule.loss(_through(call, k, weights) - v, v, tuple(own))
        gradient = torch.autograd.grad(loss.sum(), weights, create_graph=keep_graph)
    return gradient, tuple(x[..., 1:, :] for x in found)


NAIVE = Backend(lambda call: None, naive_memory)
