"""The FLOP count against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from titans_pt.config import ModelConfig
from titans_pt.kernels import linear_memory as linear_memory_package
from titans_pt.kernels.linear_memory.naive import naive_linear_memory
from titans_pt.kernels.memory import chunked
from titans_pt.layers.flops import attention_flops, product
from titans_pt.models import build_model

T = 64

ops = torch.ops.aten
UNKNOWN = {
    ops.baddbmm_: flop_registry[ops.baddbmm],
    ops._scaled_dot_product_flash_attention_for_cpu: flop_registry[ops._scaled_dot_product_flash_attention],
    ops._scaled_dot_product_flash_attention_for_cpu_backward:
        flop_registry[ops._scaled_dot_product_flash_attention_backward],
}  # fmt: skip
for count in UNKNOWN.values():
    count._get_raw = True  # they take tensors and read the shapes themselves
"""Operators that the counter omits on a CPU."""


@pytest.fixture(autouse=True)
def in_operators(monkeypatch, without_c):
    """Use PyTorch's operators in place of C, which the counter cannot see, and save no activations: the backward pass
    recomputes the memory's forward pass."""
    monkeypatch.setattr(chunked, "KEEP_BYTES", 0)


def config(mixers, **changes):
    memory = {"chunk_size": 16, "expansion": 2} | changes.pop("memory", {})
    return ModelConfig(
        mixers=mixers, vocab_size=96, d_model=32, n_layers=2, n_heads=2, mlp_hidden=48, window=T, segment=32,
        memory_tokens=16, persistent_tokens=0, conv_width=1, memory=memory, **changes,
    )  # fmt: skip


def counted(settings):
    """Measured FLOPs per token of the forward pass, and of forward and backward pass, for two rows of T tokens."""
    model = build_model(settings)
    ids = torch.randint(0, 96, (2, T))
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as forward, torch.no_grad():
        model(ids)
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as both:
        model(ids)[0].sum().backward()
    return forward.get_total_flops() / (2 * T), both.get_total_flops() / (2 * T)


@pytest.mark.parametrize("memory", [
    {}, {"depth": 1}, {"depth": 3, "per_layer_gates": True}, {"chunk_size": 32}, {"n_heads": 4, "expansion": 4},
    {"forget_to": "start", "gates": "hard"}, {"alpha": "channel"}, {"alpha": "channel", "depth": 3, "chunk_size": 8},
])  # fmt: skip
def test_lmm_is_counted_to_the_product(memory):
    settings = config(["lmm"], memory=memory)
    flops = build_model(settings).flops(T)
    forward, both = counted(settings)
    block = settings.memory.chunk_size
    # Coefficients: to_m @ m and to_m @ decay_s, (c x c) matrices of gates; 2 c (1 + c) per token, head and gate.
    layers = settings.memory.depth if settings.memory.per_layer_gates else 1
    gates = 2 * settings.n_layers * settings.memory_heads * layers * 2 * block * (block + 1) / 2
    near = 1e-12
    if settings.memory.alpha == "channel":
        gates = 0  # element by element
        near = 0.03  # autograd skips unneeded gradients in the first and last block
    assert forward == pytest.approx(flops.forward + gates, rel=1e-12)
    # The gates' running products: two gates, (c x c + 1) by (c + 1 x c + 1).
    products = settings.n_layers * settings.memory_heads * layers * 2 * 2 * (block + 1) ** 2
    if settings.memory.alpha == "channel":
        products = 0
    # The backward pass recomputes the memory's forward pass, which the model's FLOPs do not include.
    memory = build_model(settings).blocks[0].mixer.memory
    projections = 3 * product(32, 32) + memory.gates.flops()
    again = settings.n_layers * (memory.flops(T).forward - projections.forward)
    assert both == pytest.approx(flops.total + 3 * gates + products + again, rel=near)


def test_attention_counts_the_keys_that_are_seen():
    settings = config(["attention"])
    forward, both = counted(settings)
    flops = build_model(settings).flops(T)
    whole = settings.n_layers * attention_flops(32, T).forward
    masked = whole - settings.n_layers * attention_flops(32, (T + 1) / 2).forward
    assert forward == pytest.approx(flops.forward + masked, rel=1e-12)
    # The backward kernel recomputes the scores: half a forward pass more.
    assert both == pytest.approx(flops.total + 3 * masked + whole / 2, rel=1e-12)


@pytest.mark.parametrize("length", [8, 32, 64])
def test_mac_counts_the_keys_that_a_sequence_has(length):
    """A sequence shorter than a segment has fewer keys: it counts as one segment of its own length."""
    flops = [build_model(config(["mac"], mac={"segment": segment, "memory_tokens": segment // 2})).flops(length).forward
             for segment in (64, length)]  # fmt: skip
    assert flops[0] == flops[1]


def test_adapters_are_counted_to_the_product():
    """Adapters add FLOPs in each layer of a block: q, k, v, out (32, 32), gate, up (32, 48), down (48, 32)."""
    plain, adapted = config(["attention"]), config(["attention"], lora={"rank": 4})
    (forward, both), (more_forward, more_both) = counted(plain), counted(adapted)
    assert more_forward - forward == 2 * 2 * 4 * (4 * 64 + 3 * 80)
    assert more_both - both == 3 * (more_forward - forward)
    added = build_model(adapted).flops(T).forward - build_model(plain).flops(T).forward
    assert added == more_forward - forward
    assert build_model(adapted).flops(T).total - build_model(plain).flops(T).total == more_both - both


@pytest.mark.parametrize("hierarchy", [None, {"chunk": 8, "locals": [4], "shard": 16}])
def test_a_memory_of_wider_heads(hierarchy):
    """Beside projections and gates, a memory's FLOPs depend on its heads alone, not on the model's width."""
    settings = config(["mab"], memory={"depth": 1, "hierarchy": hierarchy}, attention={"head_width": 24})
    inner = []
    for width in (32, 48):
        memory = build_model(settings.model_copy(update={"d_model": width})).blocks[0].mixer.memory
        gates = [memory] if hierarchy is None else memory.memories
        outside = 3 * 2 * width * 48 + sum(one.gates.flops().forward for one in gates)
        inner.append(memory.flops(T).forward - outside)
    assert inner[0] == inner[1] > 0


@pytest.mark.parametrize("model", ["mac", "mag", "mal", "mab", "liza", "swa"])
def test_the_others_are_near(model, monkeypatch):
    """The counter counts masked scores, therefore its number is larger; on a short sequence the difference is large."""
    monkeypatch.setattr(linear_memory_package.dispatch, "chunked_linear_memory", naive_linear_memory)
    settings = config([model])
    forward, _ = counted(settings)
    assert 0.75 * forward < build_model(settings).flops(T).forward < forward
