"""Rows of the embedding and the head that stand for no token have no effect."""

import math

import pytest
import torch
from torch.nn import functional as F

from titans_pt.config import Config, ModelConfig
from titans_pt.config.checks import checked
from titans_pt.config.history import as_begun
from titans_pt.models import build_model
from titans_pt.streaming import Sampling, continuation, greedy, prefill
from titans_pt.tasks import next_token as module
from titans_pt.tasks import task_of
from titans_pt.tasks.next_token import NextTokenLoss
from titans_pt.training.plan import cost_of, make_plan

SMALL = dict(mixers=["lmm"], d_model=16, n_layers=1, n_heads=2, mlp_hidden=16)


def settings(**changes):
    return ModelConfig(**SMALL | changes)


@pytest.mark.parametrize("size, multiple, rows", [
    (50_257, 64, 50_304), (100_278, 64, 100_288), (32_000, 64, 32_000), (50_257, 1, 50_257), (50_257, 128, 50_304),
    (1, 64, 64),
])  # fmt: skip
def test_rows(size, multiple, rows):
    assert ModelConfig(vocab_size=size, vocab_multiple=multiple).vocab_rows == rows
    assert ModelConfig(vocab_size=size).vocab_multiple == 64


def test_runs_of_before_have_as_many_rows_as_entries():
    tree = Config().model_dump(mode="json")
    del tree["model"]["vocab_multiple"]
    assert as_begun(Config(), tree).model.vocab_multiple == 1


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("size", [50_257, 100_278])
def test_tensor_ranks_need_not_divide_it(size, tensor):
    config = checked(Config.model_validate({"model": {"vocab_size": size}, "parallel": {"tensor": tensor}}))
    assert make_plan(task_of(config), ranks=tensor).parameters > 0


def test_the_plan_counts_what_is_computed():
    def of(**vocabulary):
        config = Config.model_validate({"model": SMALL | vocabulary, "data": {"seq_len": 64},
                                        "train": {"batch_tokens": 64, "micro_batch": 1}})  # fmt: skip
        return make_plan(task_of(checked(config)), ranks=1), cost_of(task_of(config))

    (rounded, cost), (more, more_cost) = of(vocab_size=300), of(vocab_size=320)
    assert rounded.bytes == more.bytes and rounded.parameters == more.parameters and cost == more_cost
    assert of(vocab_size=300, vocab_multiple=1)[1].flops < cost.flops


@pytest.fixture(params=[{}, {"tie_embeddings": False}, {"vocab_size": 200}], ids=str)
def pair(request):
    """A model with exactly 37 entries, and one with the same weights and more rows, which are set to 9."""
    torch.manual_seed(0)
    changes = {"vocab_size": 37} | request.param
    exact = build_model(settings(**changes | {"vocab_size": 37, "vocab_multiple": 1})).double()
    padded = build_model(settings(**changes), tokens=37).double()
    assert not padded.embedding.weight[37:].any() and not padded.head.weight[37:].any()
    for name, p in padded.named_parameters():
        weight, more = exact.get_parameter(name).detach(), len(p) - 37
        p.data = F.pad(weight, (0, 0, 0, more), value=9.0) if name in padded.counted_rows else weight.clone()
    return exact, padded


def test_logits_and_what_is_generated(pair):
    exact, padded = pair
    ids = torch.arange(20)[None] % 37
    with torch.no_grad():
        logits, expected = padded(ids)[0], exact(ids)[0]
    assert logits.shape == (1, 20, 37)
    torch.testing.assert_close(logits, expected)
    assert list(greedy(padded, *prefill(padded, ids, 7), 10)) == list(greedy(exact, *prefill(exact, ids, 7), 10))
    assert max(continuation(padded, *prefill(padded, ids, 7), 50, (), Sampling(50.0).chooser())) < 37


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("part", [None, 6])
def test_loss_and_gradients(pair, z_loss, part, monkeypatch):
    exact, padded = pair
    ids = torch.randint(0, 37, (3, 22), generator=torch.Generator().manual_seed(0))
    expected = NextTokenLoss(exact, z_loss=z_loss)(ids, None)
    if part:
        monkeypatch.setattr(module, "LOGITS_BYTES", part * 4 * padded.config.vocab_rows)
    check(exact, padded, expected, NextTokenLoss(padded, z_loss=z_loss)(ids, None))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.usefixtures("interpreter")
def test_the_fused_head(pair, z_loss, monkeypatch):
    """The fused head is liger-kernel's, in Triton's interpreter."""
    exact, padded = (model.float() for model in pair)
    ids = torch.randint(0, 37, (3, 22), generator=torch.Generator().manual_seed(0))
    expected = NextTokenLoss(exact, z_loss=z_loss)(ids, None)
    monkeypatch.setattr(NextTokenLoss, "_fused", lambda self, x: True)
    monkeypatch.setattr(NextTokenLoss, "_losses", None)  # must not be called
    check(exact, padded, expected, NextTokenLoss(padded, z_loss=z_loss)(ids, None))


def check(exact, padded, expected, found):
    """Assert equal losses and gradients, and no gradient for rows that stand for no token."""
    torch.testing.assert_close(found, expected)
    assert 0.5 * math.log(37) < expected.item() < 2 * math.log(37)
    expected.backward()
    found.backward()
    for name, p in exact.named_parameters():
        gradient = padded.get_parameter(name).grad
        if name in padded.counted_rows:
            assert not gradient[37:].any()
        torch.testing.assert_close(gradient[: len(p)], p.grad, rtol=1e-4, atol=1e-7)


def test_an_untrained_model_begins_at_the_log_of_its_entries():
    torch.manual_seed(0)
    model, ids = build_model(settings(vocab_size=1000), tokens=70), torch.arange(60)[None]
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:])
        assert torch.equal(NextTokenLoss(model)(ids, None, torch.ones(1))["loss"], loss)
    assert float(loss) == pytest.approx(math.log(70), rel=0.1)
