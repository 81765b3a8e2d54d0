"""The Recurrent Memory Transformer against its definition, and the settings that it refuses."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.mixers import small_config, small_model
from tests.titans_pt.models.test_flops import UNKNOWN
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.layers.flops import attention_flops, mean_keys
from titans_pt.models import build_model
from titans_pt.models.ways import whole_sequence
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

S, M, T = 8, 3, 28
RMT = {"model": {"mixers": ["rmt"], "rmt": {"segment": 5, "memory_tokens": 2}}}


def tokens(length=T):
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))


def by_definition(model, ids):
    """Compute arXiv 2207.06881, Section 3.2, with each segment as a separate sequence."""
    x, outputs = model.embedding(ids) * 32**0.5, []
    owner = model.blocks[0].mixer
    memory = owner.first.tokens.expand(2, -1, -1)
    for segment in x.split(S, 1):
        y = torch.cat([memory, segment, memory], 1)
        for block in model.blocks:
            y = whole_sequence(block, y, None)
        outputs.append(y[:, M : M + segment.shape[1]])
        memory = owner.norm(y[:, -M:])
    return model.head(model.norm(torch.cat(outputs, 1)))


def test_it_is_its_definition():
    model = small_model(["rmt"])
    found, expected = model(tokens())[0], by_definition(model, tokens())
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    names, parameters = zip(*model.named_parameters(), strict=True)
    pairs = [torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected)]
    for name, ours, theirs in zip(names, *pairs, strict=True):
        assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max(), name


def test_gradients_reach_the_first_segment_from_the_last():
    model = small_model(["rmt"])
    x = model.embedding(tokens()).detach().requires_grad_()
    y, _ = model.blocks(x)
    (gradient,) = torch.autograd.grad(y[:, 3 * S :].square().sum(), x)
    assert (gradient[:, :S].abs().amax(-1) > 1e-9).all()


def test_the_memory_is_as_large_as_the_embeddings():
    model = build_model(small_config(["rmt"], d_model=1024, n_layers=3))
    owners = [name for name, _ in model.named_parameters() if "first" in name]
    assert owners == ["blocks.0.mixer.first.tokens"]
    size = model.blocks[0].mixer.first.tokens.std() / (model.embedding.weight.std() * 1024**0.5)
    assert size.item() == pytest.approx(1, rel=0.05)


def test_its_flops():
    model = small_model(["rmt"])
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter, torch.no_grad():
        model(tokens(3 * S))
    length = S + 2 * M
    masked = attention_flops(32, length).forward - attention_flops(32, mean_keys(length, length)).forward
    counted = counter.get_total_flops() / (2 * 3 * S)
    assert counted == pytest.approx(model.flops(3 * S).forward + 2 * (length / S) * masked, rel=1e-12)


def test_it_is_planned(tiny):
    assert make_plan(task_of(load_config(tiny(**RMT))), 1).bytes["activations"] > 0


@pytest.mark.parametrize(("overrides", "message"), [
    (["model.rmt.segment=16"], "model.rmt.segment: given 16; below data.seq_len=16"),
    (["model.mixers=[rmt,swa]", "model.n_layers=2"], r"model.mixers: given .*; \[rmt\] stands alone"),
    (["parallel.tensor=2"], "the mixer 'rmt' does not say how it is cut over tensor ranks; set parallel.tensor=1"),
])  # fmt: skip
def test_what_it_refuses(overrides, message, tiny):
    with pytest.raises(UserError, match=message):
        load_config(tiny(**RMT), overrides)
