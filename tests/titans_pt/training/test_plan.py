import pytest
import torch

from titans_pt.config_file import load_config
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.training.loss import NextTokenLoss
from titans_pt.training.plan import GIB, _activation_bytes, _Saved, _state_bytes, make_plan

SIZE = {"d_model": 64, "n_layers": 4, "n_heads": 4, "mlp_hidden": 96}


@pytest.fixture
def config(tiny):
    def load(seq_len=128, **changes):
        model = SIZE | {"memory": {"depth": 2, "chunk_size": 4, "expansion": 2}} | changes.pop("model", {})
        path = tiny(data={"seq_len": seq_len}, model=model, **{"train": {"batch_tokens": 8 * seq_len}} | changes)
        return load_config(path)

    return load


def test_the_grid_and_the_batch(config):
    plan = make_plan(config(parallel={"tensor": 2, "zero_stage": 2}), ranks=4)
    assert (plan.tensor, plan.data, plan.micro_batch, plan.accumulation) == (2, 2, 1, 4)
    assert "4 ranks = 2 tensor x 2 data, ZeRO 2, fp32" in plan.text()
    assert "1,024 tokens a step = 2 data ranks x 4 micro-batches x 1 samples x 128 tokens" in plan.text()
    whole = make_plan(config(), ranks=1)
    assert plan.parameters == whole.parameters == sum(p.numel() for p in build_model(config().model).parameters())
    assert plan.bytes["parameters"] < 0.6 * whole.bytes["parameters"]
    assert plan.bytes["optimiser"] < 0.3 * whole.bytes["optimiser"]
    assert plan.bytes["activations"] < 0.8 * whole.bytes["activations"]
    three = make_plan(config(parallel={"tensor": 2, "zero_stage": 3}), ranks=4)
    assert three.bytes["parameters"] < 0.6 * plan.bytes["parameters"]


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "attention", "swa"])
def test_the_estimate_is_what_autograd_keeps(config, mixer):
    """Scaled up from a shorter row, against the real model on the whole row."""
    settings = config(seq_len=2048, model={"mixers": [mixer], "window": 256, "segment": 64, "memory_tokens": 32})
    model = build_model(settings.model)
    with _Saved(model) as saved:
        NextTokenLoss(model)(torch.zeros(2, 2049, dtype=torch.int64), None)
    estimate = _activation_bytes(settings, 2)
    softmax = 2 * 4 * 2048 * settings.model.vocab_size
    assert estimate["activations"] + estimate["memory states"] + softmax == pytest.approx(saved.total, rel=0.2)


def test_memory_states_are_kept_for_every_root_of_the_blocks(config):
    settings = config(model={"mixers": ["lmm"]})
    one = 2 * 16 * 32 * 4 * 4  # two matrices, four heads, fp32
    assert _state_bytes(settings, "lmm", 128) == 3 * one * 7  # 32 blocks, every fifth
    assert _state_bytes(settings, "attention", 128) == 0


def test_checkpointing_and_sequence_need_less(config):
    size = {name: make_plan(config(**changes), ranks=2).bytes["activations"] for name, changes in {
        "plain": {}, "checkpointed": {"train": {"batch_tokens": 1024, "activation_checkpointing": True}},
        "tensor": {"parallel": {"tensor": 2}}, "sequence": {"parallel": {"tensor": 2, "sequence": True}},
    }.items()}  # fmt: skip
    assert size["checkpointed"] < 0.5 * size["plain"]
    assert size["sequence"] < size["tensor"] < size["plain"]


def test_what_cannot_fit_is_refused(config):
    plan = make_plan(config(), ranks=1)
    plan.check(plan.total / GIB / 0.8)
    with pytest.raises(UserError, match=r"the plan needs about .* GiB a rank, of which \w+ .* may use 90%"):
        plan.check(plan.total / GIB)
    with pytest.raises(UserError, match="parallel.tensor: given 2; must divide the number of ranks, 3; set it to 1"):
        make_plan(config(parallel={"tensor": 2}), ranks=3)
    with pytest.raises(UserError, match="--ranks: given 0; at least 1"):
        make_plan(config(), ranks=0)
