"""KDA, Gated DeltaNet-2, DeltaProduct and RWKV-7 by the equations of their papers, and around fla's naive functions.

Each layer is written out below from its paper, with the same weights, in float64. Its recurrence is either the paper's,
with the transition as a matrix, or flash-linear-attention's (0.6.0). The latter decays and erases in our order, and
scales q by K^-1/2 unless scale is given.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import softplus

from tests.helpers.mixers import small_config, small_model
from tests.kernels.conftest import reference  # noqa: F401 - a fixture
from tests.titans_pt.models.mixers.test_outside import compare, conv, heads, mixer_of, rms, x  # noqa: F401
from tests.titans_pt.parallel.test_split import built_one_by_one, check  # noqa: F401 - a fixture
from titans_pt.models import build_model

pytestmark = pytest.mark.filterwarnings("ignore")
WHO = pytest.mark.parametrize("by", ["paper", "fla"])


def unit(y):
    return y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def outer(a, b):
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def recurrence(q, transitions, written):
    """S <- A_t S + W_t, o = S^T q: q (B, T, H, K), lists of T matrices per row and head."""
    S, outputs = 0 * written[0], []
    for t, (A, W) in enumerate(zip(transitions, written, strict=True)):
        S = A @ S + W
        outputs.append((S * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, 1)


def inputs_of(m, x):  # noqa: F811
    return (F.silu(conv(c, p(x))) for p, c in ((m.q, m.q_conv), (m.k, m.k_conv), (m.v, m.v_conv)))


def log_decay(m, x):  # noqa: F811
    """Log decay of KDA and Gated DeltaNet-2: -exp(A) softplus(low rank + dt), with A per head, dt per channel."""
    return -m.decays.A_log.exp()[:, None] * softplus(heads(m.decay_out(m.decay_in(x))) + m.decays.dt_bias)


def gated(m, y, x):  # noqa: F811
    return m.out((rms(y, m.norm.weight) * torch.sigmoid(heads(m.gate_out(m.gate_in(x))))).flatten(-2))


@WHO
@pytest.mark.parametrize("largest", [1, 2])
def test_kda(reference, x, by, largest):  # noqa: F811
    """arXiv 2510.26692, Eq. 1: S = (I - beta k k^T) diag(exp(g)) S + beta k v^T."""
    m = mixer_of("kda", kda={"head_width": 8, "allow_neg_eigval": largest == 2})

    def theirs(x):
        q, k, v = map(heads, inputs_of(m, x))
        q, k, g, beta = unit(q), unit(k), log_decay(m, x), largest * torch.sigmoid(m.beta(x))
        if by == "fla":
            y = reference("fla", "ops.kda.naive", "naive_recurrent_kda")(q, k, v, g, beta)[0]
        else:
            bk = beta.unsqueeze(-1) * k
            A = (torch.eye(8) - outer(bk, k)) * g.exp().unsqueeze(-2)
            y = recurrence(q * 8**-0.5, A.unbind(1), outer(bk, v).unbind(1))
        return gated(m, y, x)

    compare(m, theirs, x)


@WHO
@pytest.mark.parametrize("largest", [1, 2])
def test_gdn2(reference, x, by, largest):  # noqa: F811
    """arXiv 2605.22791: S = (I - k (b * k)^T) diag(exp(g)) S + k (w * v)^T."""
    m = mixer_of("gdn2", gdn2={"head_width": 8, "allow_neg_eigval": largest == 2})

    def theirs(x):
        q, k, v = map(heads, inputs_of(m, x))
        q, k, g = unit(q), unit(k), log_decay(m, x)
        b, w = largest * torch.sigmoid(heads(m.erase(x))), torch.sigmoid(heads(m.written(x)))
        if by == "fla":
            y = reference("fla", "ops.gdn2.naive", "naive_recurrent_gdn2")(q, k, v, g, b, w)[0]
        else:
            A = (torch.eye(8) - outer(k, b * k)) * g.exp().unsqueeze(-2)
            y = recurrence(q * 8**-0.5, A.unbind(1), outer(k, w * v).unbind(1))
        return gated(m, y, x)

    compare(m, theirs, x)


@WHO
@pytest.mark.parametrize("writes, forget_gate, largest", [(2, True, 2), (3, False, 2), (3, True, 1)])
def test_deltaproduct(reference, x, by, writes, forget_gate, largest):  # noqa: F811
    """arXiv 2502.10297, Section 3: A = exp(g) (I - beta_n k_n k_n^T) ... (I - beta_1 k_1 k_1^T)."""
    own = {"n_heads": 4, "writes": writes, "forget_gate": forget_gate, "allow_neg_eigval": largest == 2}
    m = mixer_of("deltaproduct", deltaproduct=own)

    def theirs(x):
        q, k, v = inputs_of(m, x)
        q, (k, v) = unit(heads(q)), (heads(y).unflatten(-1, (writes, -1)) for y in (k, v))
        k, beta = unit(k), largest * torch.sigmoid(heads(m.beta(x)))
        g = -m.decays.A_log.exp() * softplus(m.step(x) + m.decays.dt_bias) if forget_gate else 0 * beta[..., 0]
        if by == "fla":
            naive = reference("fla", "ops.gated_delta_product.naive", "naive_recurrent_gated_delta_product")
            in_turn = (y.transpose(2, 3).flatten(1, 2) for y in (k, v))
            y = naive(q, *in_turn, g, beta.transpose(2, 3).flatten(1, 2), 6**-0.5, num_householder=writes)[0]
        else:
            A, W = g.exp()[..., None, None] * torch.eye(6), 0.0
            for n in range(writes):
                bk = beta[..., n, None] * k[..., n, :]
                H = torch.eye(6) - outer(bk, k[..., n, :])
                A, W = H @ A, (H @ W if n else 0.0) + outer(bk, v[..., n, :])
            y = recurrence(q * 6**-0.5, A.unbind(1), W.unbind(1))
        return m.out((rms(y, m.norm.weight) * F.silu(heads(m.gate(x)))).flatten(-2))

    compare(m, theirs, x)


@WHO
def test_rwkv7(reference, x, by):  # noqa: F811
    """arXiv 2503.14456, Eq. 1-20 of the first layer: S = (diag(w) - (a * kappa) kappa^T) S + k v^T."""
    m = mixer_of("rwkv7")

    def theirs(x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        r, w, k, v, a, g = (x + (before - x) * share for share in m.mix)
        r, k, v = m.r(r), m.k(k), m.v(v)
        w = torch.exp(-(torch.e**-0.5) * torch.sigmoid(m.decay_out(torch.tanh(m.decay_in(w)))))
        a, g = torch.sigmoid(m.rate_out(m.rate_in(a))), m.gate_out(torch.sigmoid(m.gate_in(g)))
        kappa = heads(k * m.erased)
        kappa = kappa / kappa.norm(dim=-1, keepdim=True)
        k = k * (1 - m.slowed) + k * a * m.slowed
        r, w, k, v, a = map(heads, (r, w, k, v, a))
        if by == "fla":
            naive = reference("fla", "ops.generalized_delta_rule.dplr.naive", "dplr_recurrence")
            y = naive(*(y.transpose(1, 2) for y in (r * 8**0.5, k, v, -kappa, a * kappa, w.log())))[0].transpose(1, 2)
        else:
            A = torch.diag_embed(w) - outer(a * kappa, kappa)
            y = recurrence(r, A.unbind(1), outer(k, v).unbind(1))
        centred = y - y.mean(-1, keepdim=True)
        y = centred / (centred.square().mean(-1, keepdim=True) + 8e-5).sqrt() * m.norm.weight + m.norm.bias
        y = y + (r * m.bonus * k).sum(-1, keepdim=True) * v
        return m.out(y.flatten(-2) * g)

    compare(m, theirs, x)


def test_without_a_decay_tensor_ranks_have_every_gradient():
    check(small_config(["deltaproduct"], deltaproduct={"n_heads": 4, "writes": 3, "forget_gate": False}), reset=True)


def test_one_write_is_gated_deltanet(x):  # noqa: F811
    one = mixer_of("deltaproduct", deltaproduct={"n_heads": 4, "writes": 1, "allow_neg_eigval": False})
    other = mixer_of("gated_deltanet")
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(x)[0], other(x)[0], rtol=1e-12, atol=1e-12)


def test_starts_are_those_of_the_papers():
    """Steps are log-uniform from 0.001 to 0.1, KDA's A from 1 to 16; RWKV-7 starts at 0, with decays per channel."""
    torch.manual_seed(0)
    for name, lowest, shape in (("kda", 1, (8, 128)), ("gdn2", 1, (8, 128)), ("deltaproduct", 0, (256,))):
        own = {"n_heads": 256} if name == "deltaproduct" else {"head_width": 128}
        decays = build_model(small_config([name], d_model=1024, n_heads=4, **{name: own})).blocks[0].mixer.decays
        steps = softplus(decays.dt_bias)
        assert decays.dt_bias.shape == shape and lowest <= decays.A_log.exp().min() and decays.A_log.exp().max() <= 16
        assert 0.00099 <= steps.min() < 0.002 and 0.05 < steps.max() <= 0.101
    blocks = build_model(small_config(["rwkv7"], n_layers=3)).blocks
    for place, m in enumerate(block.mixer for block in blocks):
        assert not m.out.weight.any() and not m.decay_in.weight.any()
        assert m.norm.weight.unique().item() == pytest.approx(((place + 1) / 3) ** 0.7)
        assert m.mix[0, 0] == 1 and m.mix[1, -1].item() == pytest.approx(1 - (31 / 32) ** (0.9 * (1 - place / 3)))
        assert m.decay_out.bias[[0, -1]].tolist() == pytest.approx([-8.0, 3.0])
        assert m.slowed.unique().item() == pytest.approx(1.02) and m.bonus.unique().item() == pytest.approx(-0.04)


def test_rwkv7_looks_one_token_back_across_calls_and_not_across_documents(x):  # noqa: F811
    m = small_model(["rwkv7"]).blocks[0].mixer
    _, state = m(x[:, :5])
    torch.testing.assert_close(state.inputs[0], x[:, 4:5], rtol=0, atol=0)
    alone, joined = m(x[:, 5:6])[0], m(x[:, 5:6], state)[0]
    assert (alone - joined).abs().max() > 1e-3
