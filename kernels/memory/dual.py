"""Blocks of the dual form, forward and backward, written out on explicit tensors.

Keys and queries are separate. A block's keys change the memory that the next block's keys use: :func:`key_side` and
:func:`write` take one block after the other. A block's queries only read: :func:`read` takes any number of blocks at
once. The backward pass has the reverse order: first :func:`read_backward` of all blocks, then :func:`write_backward`
and :func:`key_side_backward` of one block after the other.

Shapes: N = B * H rows of one block, M = K * N of K blocks (block after block), c tokens of a block, D the head width.
Layer n maps d_in to d_out. Names follow the mathematics: X the inputs of a layer on the key side, G the inner errors, Z
the inputs on the query side; d_* is the gradient of the outer loss. The backward pass is the vector-Jacobian product of
the forward pass, the inner gradient included: the second derivatives of the activation and of the LayerNorm appear in
:func:`key_side_backward`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.memory.coefficients import Coefficients, Ends
from titans_pt.kernels.memory.mlp import ACTIVATIONS, CURVATURES, LN_EPS, PULLED_BACK
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.rules import Own, Rule
from titans_pt.kernels.memory.state import Weights

_normalise = torch.ops.aten.native_layer_norm
_normalise_backward = torch.ops.aten.native_layer_norm_backward


@dataclass
class Unit:
    """A LayerNorm without its affine part: input f (..., D), its mean and 1 / standard deviation (..., 1), output."""

    f: Tensor
    mean: Tensor
    scale: Tensor
    unit: Tensor

    @staticmethod
    def of(f: Tensor) -> "Unit":
        unit, mean, scale = _normalise(f, f.shape[-1:], None, None, LN_EPS)
        return Unit(f, mean, scale, unit)

    def vjp(self, upstream: Tensor) -> Tensor:
        """Vector-Jacobian product; the Jacobian is symmetric."""
        # The operator assumes contiguous tensors.
        upstream, f, mean, scale = (x.contiguous() for x in (upstream, self.f, self.mean, self.scale))
        return _normalise_backward(upstream, f, f.shape[-1:], mean, scale, None, None, [True, False, False])[0]


@dataclass
class Keys:
    """Key side of blocks: the gradient of the inner loss in the weights of layer n is X[n]^T G[n], a sum over tokens.

    hidden, slope, pulled: for layer n < L - 1 its output, the activation's slope at the output, and the error before it
    is multiplied by the slope. error: M(k) - v. top: the loss's gradient in M(k). norm: LayerNorm after the last layer,
    if any.
    """

    X: list[Tensor]
    G: list[Tensor]
    hidden: list[Tensor]
    slope: list[Tensor]
    pulled: list[Tensor]
    error: Tensor
    top: Tensor
    norm: Unit | None


@dataclass
class Aim:
    """Targets of blocks' keys.

    goal: target of the last matrix, or of the LayerNorm before its bias, for M(k) = v; None for a backward pass. v,
    own: inputs of the rule's loss in addition to the error; own (..., c, 1) each.
    """

    goal: Tensor | None
    v: Tensor
    own: Own

    @staticmethod
    def of(k: Tensor, v: Tensor, own: Own, norm: Weights, network: NetworkShape) -> "Aim":
        target = v - k if network.residual else v
        return Aim(target - norm[1] if network.norm else target, v, own)


@dataclass
class Queries:
    """Tensors kept for the backward pass of a read.

    Z: input of layer n. scores, ZW, ZS: products of Z with the inputs of all keys, the weights and the momentum.
    hidden: output of layer n < L - 1. norm: LayerNorm after the last layer.
    """

    Z: list[Tensor]
    hidden: list[Tensor]
    scores: list[Tensor]
    ZW: list[Tensor]
    ZS: list[Tensor]
    norm: Unit | None


def key_side(k: Tensor, aim: Aim, norm: Weights, F: Weights, network: NetworkShape, rule: Rule) -> Keys:
    """Gradient of the rule's loss at the weights F, L tensors (..., d_in, d_out).

    k, and goal and v of aim: (..., c, D). norm: two (..., 1, D), or none.
    """
    assert aim.goal is not None  # only a backward pass does without it
    act, pulled_back = ACTIVATIONS[network.activation], PULLED_BACK[network.activation]
    X, hidden, slope = [k], [], []
    f = k @ F[0]
    for n in range(1, network.depth):
        hidden.append(f)
        X.append(act(f))
        slope.append(pulled_back(torch.ones_like(f), f))
        f = X[-1] @ F[n]
    unit = None
    if network.norm:
        unit = Unit.of(f)
        error = torch.addcmul(aim.goal, unit.unit, norm[0], value=-1).neg_()
        top = rule.gradient(error, aim.v, aim.own)
        g = unit.vjp(top * norm[0])
    else:
        error = f - aim.goal
        top = g = rule.gradient(error, aim.v, aim.own)
    G, pulled = [g], []
    for n in range(network.depth - 1, 0, -1):
        pulled.append(G[-1] @ F[n].mT)
        G.append(pulled[-1] * slope[n - 1])
    return Keys(X, G[::-1], hidden, slope, pulled[::-1], error, top, unit)


def write(keys: Keys, gates: list[Ends], W: Weights, S: Weights, into: Weights):
    """Write W and S (N, d_in, d_out) after a block to ``into``, W's layers first."""
    for n, c in enumerate(gates):
        new_w, new_s = into[n], into[len(W) + n]
        torch.mul(W[n], c.a, out=new_w)
        new_w.addcmul_(S[n], c.b).baddbmm_(keys.X[n].mT, c.p * keys.G[n], alpha=-1)
        torch.mul(S[n], c.m, out=new_s)
        new_s.baddbmm_(keys.X[n].mT, c.e * keys.G[n], alpha=-1)


def read(
    q: Tensor,
    keys: Keys,
    gates: list[Coefficients],
    norm: Weights,
    W: Weights,
    S: Weights,
    base: Weights | None,
    network: NetworkShape,
) -> tuple[Tensor, Queries]:
    """Read blocks with queries: q (M, c, D); W, S (M, d_in, d_out) at each block's start.

    base: M_0 (N, d_in, d_out), if the memory forgets to M_0. W is then the difference to M_0, which is forgotten to
    zero by the same recurrence, and queries use base + W.
    """
    act = ACTIVATIONS[network.activation]
    kept = Queries([], [], [], [], [], None)
    z = q
    for n, c in enumerate(gates):
        if n:
            kept.hidden.append(z)
            z = act(z)
        kept.Z.append(z)
        kept.scores.append(torch.bmm(z, keys.X[n].mT))
        kept.ZW.append(torch.bmm(z, W[n]))
        kept.ZS.append(torch.bmm(z, S[n]))
        answer = (c.A * kept.ZW[n]).addcmul_(c.B, kept.ZS[n])
        answer.baddbmm_(kept.scores[n] * c.mix, keys.G[n], alpha=-1)
        if base is not None:
            answer += _of_blocks(torch.bmm(_of_rows(z, base[n]), base[n]), z)
        z = answer
    if network.norm:
        kept.norm = Unit.of(z)
        z = torch.addcmul(norm[1], kept.norm.unit, norm[0])
    return z + q if network.residual else z, kept


def _of_rows(x: Tensor, base: Tensor) -> Tensor:
    """(K N, c, F) -> (N, K c, F): all blocks of a row side by side, base being (N, ...)."""
    return x.unflatten(0, (-1, len(base))).transpose(0, 1).flatten(1, 2)


def _of_blocks(x: Tensor, like: Tensor) -> Tensor:
    """Reverse of :func:`_of_rows`: (N, K c, F) -> (K N, c, F), ``like`` being (K N, c, ...)."""
    return x.unflatten(1, (-1, like.shape[1])).transpose(0, 1).flatten(0, 1)


@dataclass
class ReadGradients:
    """Gradients of q (M, c, D), keys' inputs X and errors G, coefficients, and the norm (two (M, 1, D) or none).

    A_dz, B_dz: the gradients of W and S are Z^T A_dz and Z^T B_dz.
    """

    q: Tensor
    X: list[Tensor]
    G: list[Tensor]
    A_dz: list[Tensor]
    B_dz: list[Tensor]
    A: list[Tensor]
    B: list[Tensor]
    mix: list[Tensor]
    norm: list[Tensor]


def read_backward(
    out: Tensor,
    keys: Keys,
    kept: Queries,
    gates: list[Coefficients],
    norm: Weights,
    W: Weights,
    S: Weights,
    base: Weights | None,
    d_base: list[Tensor],
    network: NetworkShape,
) -> ReadGradients:
    """Backward pass of :func:`read`. out: (M, c, D), gradient of its outputs. Adds the gradient of base to d_base."""
    pulled_back = PULLED_BACK[network.activation]
    layers = len(W)
    # Placeholders: the loop below fills the lists from the last layer to the first.
    dX, dG, A_dz, B_dz, dA, dB, d_mix = ([out] * layers for _ in range(7))
    d_norm, dz = [], out
    if kept.norm is not None:
        d_norm = [(out * kept.norm.unit).sum(1, keepdim=True), out.sum(1, keepdim=True)]
        dz = kept.norm.vjp(out * norm[0])
    for n in range(layers - 1, -1, -1):
        c, Z = gates[n], kept.Z[n]
        A_dz[n], B_dz[n] = c.A * dz, c.B * dz
        d_mixed = torch.bmm(dz, keys.G[n].mT).neg_()
        d_scores = d_mixed * c.mix
        dA[n] = (dz * kept.ZW[n]).sum(-1, keepdim=True)
        dB[n] = (dz * kept.ZS[n]).sum(-1, keepdim=True)
        d_mix[n] = d_mixed.mul_(kept.scores[n])
        dG[n] = torch.bmm((kept.scores[n] * c.mix).mT, dz).neg_()
        dX[n] = torch.bmm(d_scores.mT, Z)
        dZ = torch.bmm(A_dz[n], W[n].mT).baddbmm_(B_dz[n], S[n].mT).baddbmm_(d_scores, keys.X[n])
        if base is not None:
            rows = _of_rows(dz, base[n])
            dZ += _of_blocks(torch.bmm(rows, base[n].mT), dz)
            d_base[n].baddbmm_(_of_rows(Z, base[n]).mT, rows)
        if n:
            dz = pulled_back(dZ, kept.hidden[n - 1])
    return ReadGradients(dZ + out if network.residual else dZ, dX, dG, A_dz, B_dz, dA, dB, d_mix, d_norm)


@dataclass
class UnitCurvature:
    """Factors of the second derivative of a LayerNorm, whose backward pass gave the error G.

    With d the gradient of G, flat multiplies d, tilt the mean of d unit, and along the mean of d G.
    """

    flat: Tensor
    tilt: Tensor
    along: Tensor

    @staticmethod
    def of(norm: Unit, upstream: Tensor) -> "UnitCurvature":
        """upstream: gradient of the LayerNorm's output in the inner loss, (..., D)."""
        flat = -(upstream * norm.unit).mean(-1, keepdim=True) * norm.scale
        return UnitCurvature(flat, upstream * -norm.scale, norm.unit * -norm.scale)


@dataclass
class Bends:
    """Derivatives, besides :class:`Keys`, for the backward pass of writes, of any number of blocks at once.

    curve: for layer n < L - 1, the pulled error times the activation's curvature. norm: the LayerNorm's, if any.
    pG, eG: errors with their weights in the last W and S.
    """

    curve: list[Tensor]
    norm: UnitCurvature | None
    pG: list[Tensor]
    eG: list[Tensor]

    @staticmethod
    def of(keys: Keys, gates: list[Ends], norm: Weights, network: NetworkShape) -> "Bends":
        curvature = CURVATURES[network.activation]
        curve = [pulled * curvature(hidden) for pulled, hidden in zip(keys.pulled, keys.hidden, strict=True)]
        of_norm = None if keys.norm is None else UnitCurvature.of(keys.norm, keys.top * norm[0])
        pG = [c.p * g for c, g in zip(gates, keys.G, strict=True)]
        eG = [c.e * g for c, g in zip(gates, keys.G, strict=True)]
        return Bends(curve, of_norm, pG, eG)


@dataclass
class Writes:
    """Gradients of one block's key side.

    k: without the residual's part. error: (N, c, D). upstream: gradient of top * gain, which enters the LayerNorm's
    backward pass (None without a LayerNorm). v: without its part through the error (None: zero). own: (N, c, 1) each.
    """

    k: Tensor
    error: Tensor
    upstream: Tensor | None
    v: Tensor | None
    own: list[Tensor]


def state_backward(
    new_W: Weights,
    new_S: Weights,
    gates: list[Ends],
    Z: list[Tensor],
    A_dz: list[Tensor],
    B_dz: list[Tensor],
    into: tuple[Weights, Weights],
):
    """Write the gradients of a block's first W and S to ``into``, from those of its last W and S and of its queries."""
    for n, (c, d_w, d_s) in enumerate(zip(gates, *into, strict=True)):
        torch.mul(new_W[n], c.a, out=d_w).baddbmm_(Z[n].mT, A_dz[n])
        torch.mul(new_S[n], c.m, out=d_s).addcmul_(new_W[n], c.b).baddbmm_(Z[n].mT, B_dz[n])


def write_backward(
    keys: Keys,
    bends: Bends,
    dX: list[Tensor],
    dG: list[Tensor],
    new_W: Weights,
    new_S: Weights,
    gates: list[Ends],
) -> tuple[list[Tensor], list[Tensor]]:
    """Backward pass of :func:`write`. new_W, new_S: gradients of its results. dX, dG: gradients from reads, added to in
    place. Returns X times new_W and X times new_S."""
    HW = [torch.bmm(x, w) for x, w in zip(keys.X, new_W, strict=True)]
    HS = [torch.bmm(x, s) for x, s in zip(keys.X, new_S, strict=True)]
    for n, c in enumerate(gates):
        dG[n].addcmul_(c.p, HW[n], value=-1).addcmul_(c.e, HS[n], value=-1)
        dX[n].baddbmm_(bends.pG[n], new_W[n].mT, alpha=-1).baddbmm_(bends.eG[n], new_S[n].mT, alpha=-1)
    return HW, HS


def key_side_backward(
    keys: Keys, aim: Aim, bends: Bends, dX: list[Tensor], dG: list[Tensor], norm: Weights, F: Weights,
    dF: list[Tensor | None], network: NetworkShape, rule: Rule,
) -> Writes:  # fmt: skip
    """Backward pass of :func:`key_side`. dX, dG: gradients from reads and writes, overwritten here. dF: sums of the
    gradients of the weights F, None for an empty sum."""
    last = network.depth - 1
    d_hidden = []
    for n in range(last):
        pull = dG[n] * keys.slope[n]
        d_hidden.append(dG[n] * bends.curve[n])
        dG[n + 1] += pull @ F[n + 1]
        _add(dF, n + 1, pull, keys.G[n + 1])

    d_g, upstream = dG[last], None
    if network.norm:
        ln, curve = keys.norm, bends.norm
        assert ln is not None and curve is not None
        upstream = ln.vjp(d_g)
        d_error, d_v, d_own = rule.gradient_backward(upstream * norm[0], keys.error, aim.v, aim.own)
        d_unit = (d_error * norm[0]).addcmul_(d_g, curve.flat)
        d_unit.addcmul_(curve.tilt, (d_g * ln.unit).mean(-1, keepdim=True))
        df = ln.vjp(d_unit).addcmul_(curve.along, (d_g * keys.G[last]).mean(-1, keepdim=True))
    else:
        d_error, d_v, d_own = rule.gradient_backward(d_g, keys.error, aim.v, aim.own)
        df = d_error

    for n in range(last, -1, -1):
        _add(dF, n, keys.X[n], df)
        dX[n] += df @ F[n].mT
        if n:
            df = d_hidden[n - 1].addcmul_(dX[n], keys.slope[n - 1])
    return Writes(dX[0], d_error, upstream, d_v, d_own)


def _add(dF: list[Tensor | None], n: int, x: Tensor, g: Tensor):
    """Add x^T g to the gradient of F_n."""
    d = dF[n]
    dF[n] = torch.bmm(x.mT, g) if d is None else d.baddbmm_(x.mT, g)
