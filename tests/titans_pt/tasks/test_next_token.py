"""The loss: its targets, its weights, and equal values whether all logits exist at once or those of a few rows."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titans_pt.config import ModelConfig
from titans_pt.layers.loss import cross_entropy
from titans_pt.models import build_model
from titans_pt.tasks import next_token as module
from titans_pt.tasks.next_token import NextTokenLoss, at_once


class Table(nn.Module):
    """Logits looked up by the current id."""

    config, tokens = ModelConfig(vocab_size=5), 5

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 5, bias=False)

    def forward(self, ids, state=None, reset=None, head=True, output_final_state=True):
        x = F.one_hot(ids, 5).float()
        return self.head(x) if head else x, None


@torch.no_grad()
def test_loss_is_that_of_the_next_token():
    loss, ids = NextTokenLoss(Table()), torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])
    expected = F.cross_entropy(loss.model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss(ids, None)) == pytest.approx(float(expected))
    assert float(loss(ids, None, torch.ones(2))["loss"]) == pytest.approx(float(expected))
    one = loss(ids, None, torch.tensor([0.0, 1.0]))["loss"]
    assert float(one) == pytest.approx(float(loss(ids[1:], None)))
    assert loss(ids, None, torch.zeros(2)) == {"loss": 0}


def test_an_infinite_loss_spoils_every_gradient():
    loss = NextTokenLoss(Table())
    with torch.no_grad():
        loss.model.head.weight[1, 0] = -math.inf
    loss(torch.tensor([[0, 1]]), None).backward()
    assert loss.model.head.weight.grad[:, 0].isnan().all()


def test_at_once():
    assert at_once(8, 256, 2048) == (8, 256)
    assert at_once(8, 4096, 4096) == (4, 4096)
    assert at_once(8, 4096, 32_000) == (1, 2048)
    assert at_once(8, 4096, 32_000, whole=False) == (1, 4096)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0])])
@pytest.mark.parametrize("part", [40, 7])
def test_a_few_rows_or_tokens_at_a_time_are_the_same(weight, part, monkeypatch):
    torch.manual_seed(0)
    settings = ModelConfig(mixers=["swa"], window=16, vocab_size=300, d_model=16, n_layers=1, n_heads=2, mlp_hidden=16)
    loss = NextTokenLoss(build_model(settings))
    ids = torch.randint(0, 300, (5, 21))
    found = []
    rows = settings.vocab_rows
    for limit in (1 << 30, part * 4 * rows):
        monkeypatch.setattr(module, "LOGITS_BYTES", limit)
        loss.zero_grad()
        sizes = []
        note = partial(lambda sizes, x: sizes.append(x.numel()) or x, sizes)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            value = loss(ids, None, weight)
        value = value if weight is None else value["loss"]
        value.backward()
        found.append((value.detach(), [p.grad.clone() for p in loss.parameters()], max(sizes)))
    (whole, grads, most), (parts, part_grads, most_of_parts) = found
    torch.testing.assert_close(parts, whole)
    for a, b in zip(part_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert most == 5 * 20 * rows and most_of_parts < 20 * rows, "no logits are kept"


@torch.no_grad()
def test_the_z_loss_is_no_part_of_the_value():
    ids = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])
    plain = NextTokenLoss(Table())
    with_z = NextTokenLoss(plain.model, z_loss=0.5)
    assert torch.equal(with_z(ids, None), plain(ids, None))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_z_losss_gradient_is_that_of_its_definition(reduction):
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 11, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 11, (7,))
    (found,) = torch.autograd.grad(cross_entropy(logits, targets, reduction, z_loss=0.2).mean(), logits)
    definition = F.cross_entropy(logits, targets) + 0.2 * logits.logsumexp(1).square().mean()
    torch.testing.assert_close(found, torch.autograd.grad(definition, logits)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.usefixtures("interpreter")
def test_the_fused_head_is_the_same(monkeypatch, z_loss):
    """The fused head is liger-kernel's, in Triton's interpreter."""
    torch.manual_seed(0)
    settings = ModelConfig(mixers=["lmm"], vocab_size=300, d_model=16, n_layers=1, n_heads=2, mlp_hidden=16)
    loss, ids = NextTokenLoss(build_model(settings), z_loss=z_loss), torch.randint(0, 300, (3, 22))
    expected = loss(ids, None)
    expected_grads = torch.autograd.grad(expected, list(loss.parameters()))
    monkeypatch.setattr(NextTokenLoss, "_fused", lambda self, x: True)
    monkeypatch.setattr(loss, "_losses", None)  # must not be called
    found = loss(ids, None)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, list(loss.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
