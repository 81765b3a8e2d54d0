"""The baselines' layers against other projects' layers with the same weights, in float64.

Mamba, Mamba2 and Qwen3-Next are compared with transformers (5.23, its PyTorch paths). The other references are the
layer's formula around one of flash-linear-attention's naive functions (0.6.0), whose whole layers need a GPU. All fp32
in the references is replaced by fp64.
"""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from tests.helpers.mixers import small_model
from tests.kernels.conftest import _Double, reference  # noqa: F401 - a fixture

B, T, D, H = 2, 37, 32, 4
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def module(monkeypatch):
    """``module(path)``: a module of transformers in float64 that does not delegate to fla or mamba-ssm."""

    def find(path: str):
        pytest.importorskip("transformers", reason="pip install transformers")
        found = import_module(f"transformers.models.{path}")
        monkeypatch.setattr(found, "torch", _Double())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("causal_conv1d_fn", "mamba_selective_scan", "mamba2_chunk_scan", "torch_chunk_gated_delta_rule"):
            if hasattr(found, name):
                monkeypatch.setattr(found, name, getattr(getattr(found, name), "__wrapped__", getattr(found, name)))
        return found

    return find


@pytest.fixture
def x():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mixer_of(name, **changes):
    return small_model([name], **changes).blocks[0].mixer


def compare(mixer, theirs, x):
    """Compare outputs and the inputs' gradients."""
    found = []
    for call in (lambda x: mixer(x)[0], theirs):
        given = x.clone().requires_grad_()
        out = call(given)
        found.append((out.detach(), torch.autograd.grad(out.square().sum(), given)[0]))
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= 1e-11 * expected.abs().max()


def copy(layer, **weights):
    """Copy weights into a reference layer, by its parameter names; all its parameters must be given."""
    assert set(weights) == {name for name, _ in layer.named_parameters()}
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(weights[name].reshape(p.shape))
    return layer.double().eval()


def test_mamba_is_that_of_transformers(module, x):
    """With use_mambapy=False, conv_kernel=4, no bias except the convolution's."""
    theirs = module("mamba.modeling_mamba")
    config = theirs.MambaConfig(
        hidden_size=D, state_size=4, expand=2, intermediate_size=2 * D, time_step_rank=2, num_hidden_layers=1
    )
    ours = mixer_of("mamba")
    layer = copy(theirs.MambaMixer(config, 0).double(), **{
        "in_proj.weight": torch.cat([ours.x.weight, ours.z.weight]), "conv1d.weight": ours.conv.weight,
        "conv1d.bias": ours.conv.bias, "x_proj.weight": ours.low.weight, "dt_proj.weight": ours.inputs.step.weight,
        "dt_proj.bias": ours.inputs.step.bias, "A_log": ours.A_log, "D": ours.D, "out_proj.weight": ours.out.weight,
    })  # fmt: skip
    compare(ours, layer, x)


def test_mamba2_is_that_of_transformers(module, x):
    """With one group, chunk_size=16, layer_norm_epsilon=1e-5, no limit on steps."""
    theirs = module("mamba2.modeling_mamba2")
    config = theirs.Mamba2Config(
        hidden_size=D, state_size=6, expand=2, head_dim=16, num_heads=4, n_groups=1, chunk_size=16,
        layer_norm_epsilon=1e-5, num_hidden_layers=1,
    )  # fmt: skip
    ours = mixer_of("mamba2")
    parts = (ours.x, ours.B, ours.C)
    convolutions = (ours.x_conv, ours.B_conv, ours.C_conv)
    layer = copy(theirs.Mamba2Mixer(config, 0).double(), **{
        "in_proj.weight": torch.cat([p.weight for p in (ours.z, *parts, ours.step)]),
        "conv1d.weight": torch.cat([c.weight for c in convolutions]),
        "conv1d.bias": torch.cat([c.bias for c in convolutions]),
        "A_log": ours.decays.A_log, "dt_bias": ours.decays.dt_bias, "D": ours.D, "norm.weight": ours.norm.weight,
        "out_proj.weight": ours.out.weight,
    })  # fmt: skip
    compare(ours, layer, x)


def test_gated_deltanet_is_that_of_qwen3_next(module, x):
    """With as many value heads as key heads, rms_norm_eps=1e-5."""
    theirs = module("qwen3_next.modeling_qwen3_next")
    config = theirs.Qwen3NextConfig(
        hidden_size=D, linear_num_value_heads=H, linear_num_key_heads=H, linear_key_head_dim=6,
        linear_value_head_dim=12, linear_conv_kernel_dim=4, rms_norm_eps=1e-5, num_hidden_layers=1, hidden_act="silu",
    )  # fmt: skip
    ours = mixer_of("gated_deltanet")

    def by_head(*linears):
        return torch.cat([layer.weight.unflatten(0, (H, -1)) for layer in linears], 1).flatten(0, 1)

    layer = copy(theirs.Qwen3NextGatedDeltaNet(config, 0).double(), **{
        "in_proj_qkvz.weight": by_head(ours.q, ours.k, ours.v, ours.gate),
        "in_proj_ba.weight": by_head(ours.beta, ours.step),
        "conv1d.weight": torch.cat([c.weight for c in (ours.q_conv, ours.k_conv, ours.v_conv)]),
        "A_log": ours.decays.A_log, "dt_bias": ours.decays.dt_bias, "norm.weight": ours.norm.weight,
        "out_proj.weight": ours.out.weight,
    })  # fmt: skip
    compare(ours, layer, x)


# ---- formulas around flash-linear-attention's naive functions, which scale q by K^-1/2


def heads(x):
    return x.unflatten(-1, (H, -1))


def rms(x, weight, eps=1e-5):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def conv(layer, x):
    y = F.conv1d(F.pad(x.mT, (3, 0)), layer.weight.unsqueeze(1), layer.bias, groups=x.shape[-1])
    return y.mT


def test_linear_attention(reference, x):  # noqa: F811
    naive = reference("fla", "ops.linear_attn.naive", "naive_recurrent_linear_attn")
    m = mixer_of("linear_attention")

    def theirs(x):
        q, k = (F.elu(heads(layer(x))) + 1 for layer in (m.q, m.k))
        return m.out(rms(naive(q, k, heads(m.v(x)))[0], m.norm.weight).flatten(-2))

    compare(m, theirs, x)


def test_retnet(reference, x):  # noqa: F811
    naive = reference("fla", "ops.retention.naive", "naive_retention")
    m = mixer_of("retnet")
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotated(y):
        turned = torch.complex(*heads(y).chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def theirs(x):
        q, k, v = rotated(m.q(x)), rotated(m.k(x)), heads(m.v(x))
        y = naive(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2)
        return m.out((rms(y, m.norm.weight) * F.silu(heads(m.gate(x)))).flatten(-2))

    compare(m, theirs, x)


def test_gla(reference, x):  # noqa: F811
    naive = reference("fla", "ops.gla.naive", "naive_recurrent_gla")
    m = mixer_of("gla")

    def theirs(x):
        g = F.logsigmoid(m.decay_out(m.decay_in(x))) / 16
        y = naive(*(heads(y) for y in (m.q(x), m.k(x), m.v(x), g)))[0]
        return m.out((rms(y, m.norm.weight) * F.silu(heads(m.gate(x)))).flatten(-2))

    compare(m, theirs, x)


def test_hgrn2(reference, x):  # noqa: F811
    """The second of three layers is tested; its lower bound is l = softmax(logits) of the second layer."""
    naive = reference("fla", "ops.gla.naive", "naive_recurrent_gla")
    m = small_model(["hgrn2"], n_layers=3).blocks[1].mixer

    def theirs(x):
        lowest = m._bounds[0].logits.softmax(1)[:, 1]
        f = lowest + (1 - lowest) * torch.sigmoid(m.f(x))
        y = naive(*(heads(y) for y in (F.silu(m.q(x)), 1 - f, m.v(x), f.log())))[0]
        return m.out(rms(y.flatten(-2), m.norm.weight))

    compare(m, theirs, x)


def test_deltanet(reference, x):  # noqa: F811
    naive = reference("fla", "ops.delta_rule.naive", "delta_rule_recurrence")
    m = mixer_of("deltanet")

    def theirs(x):
        q, k, v = (heads(F.silu(conv(c, p(x)))) for p, c in ((m.q, m.q_conv), (m.k, m.k_conv), (m.v, m.v_conv)))
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        y = naive(*(y.transpose(1, 2) for y in (q, k, v, torch.sigmoid(m.beta(x)))))[0].transpose(1, 2)
        return m.out(rms(y, m.norm.weight).flatten(-2))

    compare(m, theirs, x)


def test_longhorn_by_its_definition(x):
    """arXiv 2407.14207, Algorithm 1: S <- (1 - D k^2) S + D x k, D = b / (1 + b k'k), per channel."""
    m = mixer_of("longhorn")

    def theirs(x):
        y = F.silu(conv(m.conv, m.x(x)))
        low, k, q = m.low(y).split([2, 4, 4], -1)
        b = torch.sigmoid(m.inputs.step(low))
        S, outputs = torch.zeros(B, 2 * D, 4, dtype=x.dtype), []
        for t in range(T):
            step = (b[:, t] / (1 + b[:, t] * k[:, t].square().sum(-1, keepdim=True))).unsqueeze(-1)
            k_t = k[:, t].unsqueeze(1)
            S = (1 - step * k_t**2) * S + step * k_t * y[:, t].unsqueeze(-1)
            outputs.append((S * q[:, t].unsqueeze(1)).sum(-1) + m.D * y[:, t])
        return m.out(torch.stack(outputs, 1) * F.silu(m.z(x)))

    compare(m, theirs, x)


@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_ttt_by_its_definition(name, x):
    """arXiv 2407.04620: every token's gradient by autograd at its mini-batch's start, in mini-batches of 4."""
    m = mixer_of(name)
    ttt, (weights, biases, (gain, shift)) = m.ttt, m.ttt.network()
    angle = (torch.arange(T) % 4)[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotated(y):
        turned = torch.complex(*heads(y).chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def read(parameters, z, h):
        y = z
        for n, (w, b) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            y = (F.gelu(y, approximate="tanh") if n else y) @ w + b
        return z + F.layer_norm(y, y.shape, gain[h], shift[h], 1e-6)

    def loss(parameters, k, v, h):
        return 0.5 * (read(parameters, k, h) - v).square().sum()

    def theirs(x):
        b = conv(m.branch, rms(x, m.branch_norm.weight))
        z = rms(x + b, m.norm.weight)
        shared = ttt.qk(z)
        q, k, v = rotated(conv(ttt.q_conv, shared)), rotated(conv(ttt.k_conv, shared)), heads(ttt.v(z))
        rate = ttt.base_lr * torch.sigmoid(ttt.rate(z)) / 8
        rows = []
        for r in range(B):
            columns = []
            for h in range(H):
                now = tuple(p[h] for layer in zip(weights, biases, strict=True) for p in layer)
                outputs = []
                for t in range(T):
                    if t % 4 == 0:
                        start, sums = now, tuple(torch.zeros_like(p) for p in now)
                    step = grad(loss)(start, k[r, t, h], v[r, t, h], h)
                    sums = tuple(s + rate[r, t, h] * g for s, g in zip(sums, step, strict=True))
                    tau = (1 / (t % 4 + 1) + ttt.tau[t % 4]).clamp(min=0)
                    now = tuple(p - tau * s for p, s in zip(start, sums, strict=True))
                    outputs.append(read(now, q[r, t, h], h))
                columns.append(torch.stack(outputs))
            rows.append(torch.stack(columns, 1).flatten(-2))
        y = F.layer_norm(torch.stack(rows), (D,), ttt.norm.weight, ttt.norm.bias, 1e-6)
        return b + ttt.out(y * F.gelu(ttt.gate(z), approximate="tanh"))

    compare(m, theirs, x)
