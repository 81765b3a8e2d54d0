"""Low-rank adapters: zero at the start, W + alpha / rank B A later, on the named layers."""

import pytest
import torch
from torch import nn

from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.layers.lora import LowRank, is_adapter, merged
from titans_pt.models import build_model
from titans_pt.models.backbone import exempt_from_decay

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def model(lora=None, mixers=("attention", "mab"), **changes):
    torch.manual_seed(3)
    return build_model(ModelConfig.model_validate(dict(
        mixers=list(mixers), vocab_size=50, d_model=16, n_layers=len(mixers), n_heads=2, mlp_hidden=24, window=6,
        init_std=0.2, attention={"bias": True}, memory={"chunk_size": 4}, lora=lora,
    ) | changes))  # fmt: skip


def adapted(found):
    return {name for name, module in found.named_modules() if isinstance(module, LowRank)}


def test_a_model_with_adapters_starts_as_without():
    plain, found = model(), model({"rank": 3})
    rest = {name: p for name, p in found.named_parameters() if not is_adapter(name)}
    assert rest.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(p, rest[name]) for name, p in plain.named_parameters())
    assert torch.equal(found(IDS)[0], plain(IDS)[0])
    assert adapted(found) == {n for n, m in plain.blocks.named_modules(prefix="blocks") if isinstance(m, nn.Linear)}
    for layer in (module for module in found.modules() if isinstance(module, LowRank)):
        assert layer.lora_a.shape == (3, layer.in_features) and layer.lora_b.shape == (layer.out_features, 3)
        assert (
            layer.lora_a.abs().max() <= layer.in_features**-0.5 and layer.lora_a.std() > 0.4 * layer.in_features**-0.5
        )
        assert not layer.lora_b.any()
    assert not any(map(is_adapter, exempt_from_decay(found)))


def test_patterns_choose_layers():
    found = adapted(model({"layers": ["*.attention.q", "blocks.1.mlp.*"]}))
    assert found == {"blocks.0.mixer.attention.q", "blocks.1.mixer.attention.q", "blocks.1.mlp.gate", "blocks.1.mlp.up",
                     "blocks.1.mlp.down"}  # fmt: skip


@pytest.mark.parametrize("pattern", ["head", "embedding", "*.attention.q.weight", "blocks.7.*"])
def test_a_pattern_that_names_no_layer_of_the_blocks(pattern):
    with pytest.raises(UserError) as error:
        model({"layers": ["*.mlp.*", pattern]})
    message = str(error.value)
    assert message.startswith(
        f"model.lora.layers: {pattern!r} is the name of no linear layer; there are blocks.*.mixer."
    )
    assert ".1." not in message and "blocks.*.mlp.down" in message and "\n" not in message


@torch.no_grad()
def test_what_an_adapter_computes_is_what_the_merged_weights_do():
    found = model({"rank": 3, "alpha": 6.0, "layers": ["*.attention.*", "*.mlp.*"]}).double()
    for name, p in found.named_parameters():
        if name.endswith("lora_b"):
            p.normal_(std=0.1)
    layer, x = found.blocks[0].mixer.attention.q, torch.randn(4, 16).double()
    by_hand = x @ layer.weight.T + layer.bias + 2 * (x @ layer.lora_a.T) @ layer.lora_b.T
    torch.testing.assert_close(layer(x), by_hand)
    plain = model().double()
    before = plain(IDS)[0]
    plain.load_state_dict(merged(found))
    torch.testing.assert_close(plain(IDS)[0], found(IDS)[0])
    assert (found(IDS)[0] - before).abs().max() > 0.01


def test_what_is_frozen_has_no_gradient_and_adapters_learn():
    found = model({"rank": 2, "layers": ["*.attention.*"]})
    for name, p in found.named_parameters():
        p.requires_grad_(is_adapter(name))
    optimizer = torch.optim.SGD([p for p in found.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(found(IDS[:, :-1])[0].flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]
    assert all(p.grad is None for name, p in found.named_parameters() if not is_adapter(name))
    assert all(p.grad.any() for name, p in found.named_parameters() if is_adapter(name))


@torch.no_grad()
def test_tokens_one_by_one_are_those_of_one_call():
    """The prepared fast path for single tokens is not taken with adapters."""
    found = model({"rank": 2}, ["lmm", "mab"]).eval()
    for name, p in found.named_parameters():
        if name.endswith("lora_b"):
            p.normal_(std=0.1)
    state, logits = None, []
    for token in IDS.split(1, 1):
        y, state = found(token, state)
        logits.append(y)
    torch.testing.assert_close(torch.cat(logits, 1), found(IDS)[0], rtol=1e-4, atol=1e-4)
