"""One compute block of the dual form, forward and backward, written out on explicit tensors.

Shapes: N = B * H rows, c tokens of the block, D the head width. Layer n maps d_in to d_out. Names follow the
mathematics: X the inputs of a layer on the key side, G the inner errors, Z the inputs on the query side; d* is the
gradient of the outer loss. The backward pass is the vector-Jacobian product of the forward pass, the inner gradient
included: the second derivatives of the activation and of the LayerNorm appear in :func:`_key_backward`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.memory.mlp import ACTIVATIONS, CURVATURES, LN_EPS, SLOPES
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import Weights


@dataclass
class Coefficients:
    """What the gates say about a block; one for each layer (or one shared by all).

    A, B: (N, c, 1), weight of the block's first M and S in M_t. mix: (N, c, c), P[t, i] theta_i.
    a, b, m: (N, 1, 1), weights of M and S in the last M, and of S in the last S.
    p, e: (N, c, 1), P[c, i] theta_i and E[c, i] theta_i.
    """

    A: Tensor
    B: Tensor
    mix: Tensor
    a: Tensor
    b: Tensor
    m: Tensor
    p: Tensor
    e: Tensor


@dataclass
class Kept:
    """Intermediates of a forward pass that its backward pass needs."""

    X: list[Tensor]
    hidden: list[Tensor]
    G: list[Tensor]
    pulled: list[Tensor]
    key_unit: Tensor | None
    key_scale: Tensor | None
    upstream: Tensor | None
    error: Tensor
    Z: list[Tensor]
    query_hidden: list[Tensor]
    scores: list[Tensor]
    mixed: list[Tensor]
    ZW: list[Tensor]
    ZS: list[Tensor]
    out_unit: Tensor | None
    out_scale: Tensor | None


def _unit(f: Tensor) -> tuple[Tensor, Tensor]:
    """LayerNorm without its affine part: (normalised, 1 / standard deviation)."""
    centred = f - f.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + LN_EPS)
    return centred * scale, scale


def _unit_vjp(upstream: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Vector-Jacobian product of _unit's first output. The Jacobian is symmetric."""
    along = (upstream * unit).mean(-1, keepdim=True)
    return (upstream - upstream.mean(-1, keepdim=True) - unit * along) * scale


def key_side(k: Tensor, v: Tensor, norm: Weights, F: Weights, network: NetworkShape):
    """Rank-one factors of the gradient of ||M(k) - v||^2 at the weights F: of layer n, X[n] (outer) G[n].

    k, v (..., c, D), F L tensors (..., d_in, d_out), norm two (..., 1, D) or none. Returns X, hidden, G, pulled,
    key_unit, key_scale, upstream, error of :class:`Kept`.
    """
    act, slope = ACTIVATIONS[network.activation], SLOPES[network.activation]
    X, hidden = [k], []
    f = k @ F[0]
    for w in F[1:]:
        hidden.append(f)
        X.append(act(f))
        f = X[-1] @ w
    key_unit = key_scale = upstream = None
    if network.norm:
        key_unit, key_scale = _unit(f)
        f = torch.addcmul(norm[1], key_unit, norm[0])
    error = 2 * ((f + k if network.residual else f) - v)
    g = error
    if network.norm:
        upstream = error * norm[0]
        g = _unit_vjp(upstream, key_unit, key_scale)
    G, pulled = [g], []
    for n in range(len(F) - 1, 0, -1):
        pulled.append(G[-1] @ F[n].mT)
        G.append(pulled[-1] * slope(hidden[n - 1]))
    G.reverse()
    pulled.reverse()
    return X, hidden, G, pulled, key_unit, key_scale, upstream, error


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Coefficients],
    norm: Weights,
    W: Weights,
    S: Weights,
    F: Weights,
    base: Weights | None,
    network: NetworkShape,
) -> tuple[Tensor, Weights, Weights, Kept]:
    """q, k, v (N, c, D); W, S, F: running weights, momentum, weights at the chunk's start, (N, d_in, d_out).

    base: M_0, if that is what is forgotten to. W is then the difference to it, which is forgotten to zero: the same
    recurrence, and queries meet base + W. F is always whole.

    Returns outputs (N, c, D), W and S after the block, and what the backward pass needs.
    """
    act = ACTIVATIONS[network.activation]
    X, hidden, G, pulled, key_unit, key_scale, upstream, error = key_side(k, v, norm, F, network)

    Z, query_hidden, scores, mixed, ZW, ZS = [q], [], [], [], [], []
    new_W, new_S = [], []
    for n, c in enumerate(gates):
        if n:
            query_hidden.append(z)  # noqa: F821 - of the layer below
            Z.append(act(z))  # noqa: F821
        scores.append(torch.bmm(Z[n], X[n].mT))
        mixed.append(scores[n] * c.mix)
        ZW.append(torch.bmm(Z[n], W[n]))
        ZS.append(torch.bmm(Z[n], S[n]))
        z = (c.A * ZW[n]).addcmul_(c.B, ZS[n]).baddbmm_(mixed[n], G[n], alpha=-1)
        if base is not None:
            z.baddbmm_(Z[n], base[n])
        new_W.append((c.a * W[n]).addcmul_(c.b, S[n]).baddbmm_(X[n].mT, c.p * G[n], alpha=-1))
        new_S.append((c.m * S[n]).baddbmm_(X[n].mT, c.e * G[n], alpha=-1))
    out_unit = out_scale = None
    if network.norm:
        out_unit, out_scale = _unit(z)
        z = torch.addcmul(norm[1], out_unit, norm[0])
    kept = Kept(
        X, hidden, G, pulled, key_unit, key_scale, upstream, error,
        Z, query_hidden, scores, mixed, ZW, ZS, out_unit, out_scale,
    )  # fmt: skip
    return z + q if network.residual else z, tuple(new_W), tuple(new_S), kept


@dataclass
class Gradients:
    """Gradients of a block's inputs, as forward takes them; gates per layer; norm (2 of (N, 1, D)) or empty."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: list[Coefficients]
    norm: list[Tensor]
    W: list[Tensor]
    S: list[Tensor]
    F: list[Tensor]


def backward(
    out: Tensor,
    new_W: Weights,
    new_S: Weights,
    gates: list[Coefficients],
    norm: Weights,
    W: Weights,
    S: Weights,
    F: Weights,
    base: Weights | None,
    d_base: list[Tensor],
    kept: Kept,
    network: NetworkShape,
) -> Gradients:
    """out, new_W, new_S: gradients of forward's results, the rest as forward had it.

    The gradient of base is added to d_base.
    """
    slope = SLOPES[network.activation]
    d_norm = []
    dz = out
    if network.norm:
        d_norm = [(out * kept.out_unit).sum(1, keepdim=True), out.sum(1, keepdim=True)]
        dz = _unit_vjp(out * norm[0], kept.out_unit, kept.out_scale)
    layers = len(W)
    dX, dG, dW, dS, d_gates = ([None] * layers for _ in range(5))
    for n in range(layers - 1, -1, -1):
        c, X, G, Z = gates[n], kept.X[n], kept.G[n], kept.Z[n]
        A_dz, B_dz = c.A * dz, c.B * dz
        d_mixed = -torch.bmm(dz, G.mT)
        d_scores = d_mixed * c.mix
        HW, HS = torch.bmm(X, new_W[n]), torch.bmm(X, new_S[n])
        pG, eG = c.p * G, c.e * G
        d_gates[n] = Coefficients(
            A=(dz * kept.ZW[n]).sum(-1, keepdim=True),
            B=(dz * kept.ZS[n]).sum(-1, keepdim=True),
            mix=d_mixed * kept.scores[n],
            a=_inner(new_W[n], W[n]),
            b=_inner(new_W[n], S[n]),
            m=_inner(new_S[n], S[n]),
            p=-(G * HW).sum(-1, keepdim=True),
            e=-(G * HS).sum(-1, keepdim=True),
        )
        dG[n] = (c.p * HW).baddbmm_(kept.mixed[n].mT, dz).addcmul_(c.e, HS).neg_()
        dX[n] = torch.bmm(d_scores.mT, Z)
        dX[n].baddbmm_(pG, new_W[n].mT, alpha=-1).baddbmm_(eG, new_S[n].mT, alpha=-1)
        dW[n] = (c.a * new_W[n]).baddbmm_(Z.mT, A_dz)
        dS[n] = (c.b * new_W[n]).addcmul_(c.m, new_S[n]).baddbmm_(Z.mT, B_dz)
        dZ = torch.bmm(A_dz, W[n].mT).baddbmm_(B_dz, S[n].mT).baddbmm_(d_scores, X)
        if base is not None:
            dZ.baddbmm_(dz, base[n].mT)
            d_base[n].baddbmm_(Z.mT, dz)
        if n:
            dz = dZ * slope(kept.query_hidden[n - 1])
    d_k, d_v, dF, key_norm = _key_backward(dX, dG, norm, F, kept, network)
    d_q = dZ + out if network.residual else dZ
    d_norm = [x + y for x, y in zip(d_norm, key_norm, strict=True)]
    return Gradients(d_q, d_k, d_v, d_gates, d_norm, dW, dS, dF)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """(N, d, h) x 2 -> (N, 1, 1), sums of products, without a tensor of that size."""
    n = x.shape[0]
    return torch.bmm(x.reshape(n, 1, -1), y.reshape(n, -1, 1))


def _key_backward(dX: list[Tensor], dG: list[Tensor], norm: Weights, F: Weights, kept: Kept, network: NetworkShape):
    """From the gradients of inputs and inner errors back to k, v, the frozen weights and the LayerNorm.

    Accumulates into dX and dG, which nobody else holds.
    """
    slope, curvature = SLOPES[network.activation], CURVATURES[network.activation]
    last = len(F) - 1
    dF, d_hidden = [None] * (last + 1), []
    for n in range(last):
        pull = dG[n] * slope(kept.hidden[n])
        d_hidden.append(dG[n] * kept.pulled[n] * curvature(kept.hidden[n]))
        dG[n + 1].baddbmm_(pull, F[n + 1])
        dF[n + 1] = torch.bmm(pull.mT, kept.G[n + 1])

    d_error, d_norm = dG[last], []
    if network.norm:
        unit, scale, d_g = kept.key_unit, kept.key_scale, dG[last]
        d_upstream = _unit_vjp(d_g, unit, scale)
        d_error = d_upstream * norm[0]
        d_y = 2 * d_error
        d_norm = [torch.addcmul(d_upstream * kept.error, d_y, unit).sum(1, keepdim=True), d_y.sum(1, keepdim=True)]
        d_unit = d_y * norm[0] - scale * (
            d_g * (kept.upstream * unit).mean(-1, keepdim=True) + kept.upstream * (d_g * unit).mean(-1, keepdim=True)
        )
        along = (d_unit * unit + d_g * kept.G[last]).mean(-1, keepdim=True)
        df = (d_unit - unit * along) * scale
        df = df - df.mean(-1, keepdim=True)
    else:
        d_y = df = 2 * d_error

    for n in range(last, -1, -1):
        if dF[n] is None:
            dF[n] = torch.bmm(kept.X[n].mT, df)
        else:
            dF[n].baddbmm_(kept.X[n].mT, df)
        dX[n].baddbmm_(df, F[n].mT)
        if n:
            df = torch.addcmul(d_hidden[n - 1], dX[n], slope(kept.hidden[n - 1]))
    d_k = dX[0] + d_y if network.residual else dX[0]
    return d_k, -d_y, dF, d_norm
