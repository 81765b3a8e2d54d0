"""The paper's forms where our defaults deviate: they are causal, can be streamed, and train on tensor ranks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.titans_pt.parallel.test_split import Fp64Loss, on_ranks
from titans_pt.config import ModelConfig
from titans_pt.models import build_model
from titans_pt.parallel import TensorParallel
from titans_pt.parallel.layers import vocabulary_cross_entropy

FORMS = {
    "lmm-silu": ("lmm", {"output_gate": "silu"}),
    "mac-product": ("mac", {"segment": 8, "memory_tokens": 4, "gate": "product", "gate_activation": "sigmoid"}),
    "mac-attention": ("mac", {"segment": 8, "memory_tokens": 4, "write": "attention"}),
    "mac-paper": ("mac", {"segment": 8, "memory_tokens": 4, "write": "attention", "gate": "product"}),
    "mag-product": ("mag", {"gate": "product", "gate_activation": "tanh"}),
    "mal-plain": ("mal", {"residual": False, "output_gate": "silu"}),
}
T = 29


def settings(mixer, own):
    return ModelConfig(
        mixers=[mixer], vocab_size=50, d_model=16, n_layers=2, n_heads=2, mlp_hidden=24, window=6, persistent_tokens=3,
        memory={"chunk_size": 4, "expansion": 2}, **{mixer: own},
    )  # fmt: skip


def build(config):
    torch.manual_seed(0)
    model = build_model(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.fixture(params=FORMS, ids=str)
def config(request):
    return settings(*FORMS[request.param])


def ids():
    return torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(0))


def test_causal_streaming_and_reset(config):
    model = build(config).eval()
    whole, _ = model(ids())
    changed = ids()
    changed[0, 17] = (changed[0, 17] + 1) % 50
    after, _ = model(changed)
    assert torch.equal(after[0, :17], whole[0, :17]) and torch.equal(after[1], whole[1])
    parts, state = [], None
    for piece in ids().split([1, 12, 16], dim=1):
        logits, state = model(piece, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, 11] = True
    torch.testing.assert_close(model(ids(), reset=reset)[0][:, 11:], model(ids()[:, 11:])[0], rtol=1e-10, atol=1e-10)


def test_it_is_another_model(config):
    (mixer,) = config.mixers
    usual = settings(mixer, {k: v for k, v in config.section(mixer).items() if k in ("segment", "memory_tokens")})
    assert not torch.allclose(build(config).eval()(ids())[0], build(usual).eval()(ids())[0])


def test_every_parameter_learns_on_tensor_ranks_as_on_one(config):
    whole = build(config)
    Fp64Loss(whole)(ids(), None).backward()
    models = [build(config) for _ in range(2)]

    def rank(group):
        split = TensorParallel(models[group.rank], group)
        loss = Fp64Loss(models[group.rank], partial(vocabulary_cross_entropy, group=group))
        loss(ids(), None).backward()
        return {name: split.whole(name, p.grad) for name, p in models[group.rank].named_parameters()}

    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for found in on_ranks(2, rank):
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)


def test_the_product_of_the_paper():
    """o = act(norm(a)) * act(norm(b)), with no further parameters."""
    from titans_pt.models.mixers.common import BranchGate, GateSettings

    gate = BranchGate(ModelConfig(d_model=8, n_heads=2), GateSettings(gate="product", gate_activation="silu"))
    x, a, b = torch.randn(3, 2, 5, 8).unbind(0)
    norm = [y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) for y in (a, b)]
    torch.testing.assert_close(gate(x, a, b), F.silu(norm[0]) * F.silu(norm[1]))
    assert {name for name, _ in gate.named_parameters()} == {"norm_a.weight", "norm_b.weight"}
