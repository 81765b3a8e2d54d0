"""Layers by keywords equal the internal ones, train in a plain loop, and refuse wrong settings in one line."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.mixers import NAMES
from tests.helpers.mixers import OWN as OWN_SETTINGS
from titans_pt import LMM, MAC, MAG, MAL, NeuralMemory, UserError, mixer
from titans_pt.config import MemoryConfig, ModelConfig
from titans_pt.layers.memory import NeuralMemory as Internal
from titans_pt.library.layers import _OF_A_MODEL
from titans_pt.models.backbone import initialise
from titans_pt.models.mixers import MIXERS
from titans_pt.models.mixers.common import MemoryMixer, Windowed

SMALL = {"n_heads": 2, "chunk_size": 4, "depth": 2}
MIXER = {"n_heads": 2, "chunk_size": 4, "depth": 1, "persistent_tokens": 2}
ALONE = [name for name in NAMES if name not in ("hgrn2", "rwkv7", "rmt")]
"""Mixers that can be used as a single layer."""
WINDOWED = [name for name in NAMES if issubclass(MIXERS.find(name), Windowed)]
OWN = {MAC: {"segment": 8, "memory_tokens": 4}, MAG: {"window": 8}, MAL: {"window": 8}, LMM: {}}


def test_the_layer_equals_the_internal_one():
    torch.manual_seed(0)
    layer = NeuralMemory(16, **SMALL, alpha_init=0.01, conv_width=3)
    config = ModelConfig(
        d_model=16, n_heads=2, conv_width=3, memory=MemoryConfig(chunk_size=4, depth=2, alpha_init=0.01)
    )
    torch.manual_seed(0)
    other = Internal(16, 2, 3, config.memory, config.norm_eps)
    initialise(other, config)
    assert layer.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))
    x = torch.randn(2, 10, 16)
    (y, state), (z, other_state) = layer(x), other(x)
    assert torch.equal(y, z)
    assert torch.equal(layer(x, state)[0], other(x, other_state)[0])


def test_the_defaults_are_those_of_the_settings():
    assert NeuralMemory(32).config.model_dump() == MemoryConfig().model_dump()
    assert NeuralMemory(32).q.n_heads == ModelConfig().n_heads
    assert MAC(32).segment == 512
    assert LMM(24).memory.q.n_heads == 12, "16 do not divide 24"


@pytest.mark.parametrize("kind", OWN)
def test_a_mixer_equals_the_internal_one(kind):
    torch.manual_seed(0)
    layer = kind(16, **MIXER, **OWN[kind])
    own = {key: value for key, value in OWN[kind].items() if key != "window"}
    memory = MemoryConfig(chunk_size=4, depth=1)
    tree = {"d_model": 16, "n_heads": 2, "persistent_tokens": 2, "window": OWN[kind].get("window", 2048)}
    config = ModelConfig(mixers=[kind.__name__.lower()], memory=memory, **tree, **{kind.__name__.lower(): own})
    torch.manual_seed(0)
    other = MIXERS.find(kind.__name__.lower())(config)
    initialise(other, config)
    x = torch.randn(2, 20, 16)
    assert torch.equal(layer(x)[0], other(x)[0])
    whole = layer(x)[0]
    first, state = layer(x[:, :7])
    second, _ = layer(x[:, 7:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-5, rtol=1e-4)
    assert torch.equal(copy.deepcopy(layer)(x)[0], whole)


@pytest.mark.parametrize("name", ["swa", "gated_deltanet", "mamba2", "lmm"])
def test_any_mixer_by_its_name(name):
    layer = mixer(name, 16)
    y, state = layer(torch.randn(2, 6, 16))
    assert y.shape == (2, 6, 16) and layer(torch.randn(2, 1, 16), state)[0].shape == (2, 1, 16)


@pytest.mark.parametrize("name", ["memory", *ALONE])
def test_a_layer_of_the_meta_device_begins_as_any_other(name):
    def make():
        return NeuralMemory(16, n_heads=2) if name == "memory" else mixer(name, 16)

    torch.manual_seed(0)
    whole = make()
    with torch.device("meta"):
        layer = make()
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.fill_(7)
    torch.manual_seed(0)
    layer.reset_parameters()
    found, expected = (dict([*each.named_parameters(), *each.named_buffers()]) for each in (layer, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) and not found[key].is_meta for key in found)
    x = torch.randn(2, 6, 16)
    assert torch.equal(layer(x)[0], whole(x)[0])
    layer(x)[0].sum().backward()


def test_buffers_of_a_layer_of_ones_own_start_again_too():
    class Counting(NeuralMemory):
        def __init__(self, *given, **settings):
            super().__init__(*given, **settings)
            self.register_buffer("seen", torch.zeros(2))

    layer = Counting(16, n_heads=2)
    layer.seen += 7
    layer.reset_parameters()
    assert layer.seen.tolist() == [0, 0]


def test_a_layer_follows_the_training():
    x = torch.randn(1, 6, 16)
    torch.manual_seed(0)
    layer = mixer("liza", 16, n_heads=2, mix_warmup=0.5)
    whole = layer(x)[0]
    layer.set_progress(0.0)
    assert layer.mix == 0
    layer.set_progress(0.5)
    assert torch.equal(layer(x)[0], whole)
    with pytest.raises(UserError, match="^done: given 2; allowed: from 0 to 1$"):
        layer.set_progress(2)


class _Model(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.memory, self.mixer = NeuralMemory(16, **SMALL), kind(16, **MIXER, **settings)
        self.head = nn.Linear(16, 8)

    def forward(self, ids, states=(None, None)):
        x = self.embedding(ids)
        y, first = self.memory(x, states[0])
        x = x + y
        y, second = self.mixer(x, states[1])
        return self.head(x + y), (first, second)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_a_plain_loop_trains_it(kind, autocast):
    torch.manual_seed(0)
    model = _Model(kind, **OWN[kind])
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-2)
    ids = (torch.arange(9)[None] * torch.tensor([[1], [3]])) % 8
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            first, states = model(ids[:, :4])
            second, _ = model(ids[:, 4:8], states)
        logits = torch.cat([first, second], 1).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: NeuralMemory(16, rule=3), "rule: given 3; allowed: a text"),
        (lambda: LMM(16, chunksize=4), "LMM: unknown keyword 'chunksize' (given 4); nearest allowed keyword: chunk"),
        (lambda: MAC(16, memory=None, chunk_size=4), "MAC: memory: given None, and a setting of it as chunk_size=4"),
        (lambda: MAC(16, chunk_size=4, n_heads=2, memory=5), "MAC: memory: given 5, and a setting of it as chunk"),
        (lambda: MAC(16, rule="yaad", memory={"yaad": 3}, form="switch"), "MAC: yaad: given 3, and a setting of it"),
        (lambda: MAC(16, segmnt=8), "MAC: unknown keyword 'segmnt' (given 8); nearest allowed keyword: segment"),
        (lambda: NeuralMemory(16, write_cost=1.0), "NeuralMemory: unknown keyword 'write_cost' (given 1.0)"),
        (lambda: mixer("swa", 16, depth=2), "swa: unknown keyword 'depth' (given 2)"),
        (lambda: mixer("gla", 16, norm_ep=1.0), "gla: unknown keyword 'norm_ep' (given 1.0); nearest allowed"),
        (lambda: mixer("gla", 16, nheads=2), "gla: unknown keyword 'nheads' (given 2); nearest allowed keyword: n_h"),
        (lambda: mixer("kda", 16, n_heads=2), "n_heads: given 2; heads of kda follow from another setting: give head_"),
        (lambda: mixer("mamba", 16, n_heads=2), "n_heads: given 2; mamba has no heads: leave it out"),
        (lambda: NeuralMemory(16, n_heads=5), "n_heads: given 5; must divide d_model=16"),
        (lambda: NeuralMemory(16, depth=9), "depth: given 9; allowed: less than or equal to 4"),
        (lambda: NeuralMemory(16, rule="yad"), "rule: given 'yad'; allowed: "),
        (lambda: MAC(37), "d_model: given 37; must be even: RoPE rotates pairs"),
        (lambda: MAC(16, segment=10), "segment: given 10; must be a multiple of chunk_size=16"),
        (lambda: LMM(16, memory={"dept": 1}), "dept: unknown key (given 1); nearest known key: depth"),
        (lambda: mixer("rmt", 16), "mixer: given 'rmt', whose layers depend on each other"),
        (lambda: NeuralMemory(16)(torch.ones(2, 16)), "x: given shape (2, 16); allowed: (B, T, 16)"),
        (lambda: LMM(16)(torch.ones(2, 3, 16).long()), "x: given torch.int64; allowed: a floating-point type"),
        (lambda: LMM(16)(torch.ones(2, 3, 8)), "x: given shape (2, 3, 8); allowed: (B, T, 16)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_state_of_other_rows_is_refused():
    layer = NeuralMemory(16, **SMALL)
    _, state = layer(torch.randn(2, 4, 16))
    with pytest.raises(UserError, match="state: given one of 2 rows; x has 3"):
        layer(torch.randn(3, 4, 16), state)


LEVELS = {"chunk": 4, "shard": 8, "locals": [2]}


@pytest.mark.parametrize("kind, settings, others", [
    (LMM, {}, {"n_heads": 1}),
    (LMM, {}, {"depth": 2}),
    (LMM, {"persistent_tokens": 0}, {"persistent_tokens": 0, "n_heads": 1}),
    (LMM, {}, {"hierarchy": LEVELS}),
    (LMM, {"hierarchy": LEVELS}, {}),
    (LMM, {"hierarchy": LEVELS}, {"hierarchy": LEVELS, "n_heads": 1}),
    (MAC, {}, {"n_heads": 1}),
    (MAC, {}, {"memory": {"n_heads": 1}}),
    (MAC, {}, {"depth": 2}),
    (MAG, {}, {"memory": {"n_heads": 1}}),
    (MAL, {}, {"n_heads": 1}),
])  # fmt: skip
def test_a_state_of_another_layer_is_one_line(kind, settings, others):
    one, other = (kind(16, **MIXER | OWN[kind] | own) for own in (settings, others))
    with pytest.raises(ValueError, match="^(state: given|neural_memory: initial_state is of another memory)") as error:
        other(torch.randn(2, 5, 16), one(torch.randn(2, 6, 16))[1])
    assert "\n" not in str(error.value)


def test_a_rules_own_settings_are_keywords():
    layer = NeuralMemory(16, n_heads=2, chunk_size=4, rule="omega", window=3)
    assert layer.config.section("omega")["window"] == 3
    with pytest.raises(UserError, match="unknown keyword 'window'"):
        NeuralMemory(16, window=3)


SHARED = {
    "n_heads": (2, 4), "window": (2, 5), "persistent_tokens": (1, 3), "conv_width": (2, 3), "rope_base": (9.0, 99.0),
    "value_filters": ("identity", "random"), "attention": ({}, {"bias": True, "qk_norm": True}),
    "norm_eps": (1e-5, 0.1), "init_std": (0.02, 0.2), "n_layers": (1, 8),
}  # fmt: skip
"""Two values of each keyword that several mixers take."""


def _made(make, value):
    """Return a layer's initial parameters, and its outputs with random ones, because some parts start at zero."""
    torch.manual_seed(0)
    layer = make(value)
    begun = {name: p.detach().clone() for name, p in layer.named_parameters()}
    torch.manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape) / p.shape[-1] ** 0.5)
        return begun, layer(torch.randn(1, 12, 32))[0]


def _differ(one, other) -> bool:
    (p, y), (q, z) = one, other
    return p.keys() != q.keys() or any(not torch.equal(p[n], q[n]) for n in p) or not torch.equal(y, z)


@pytest.mark.parametrize("keyword", SHARED)
@pytest.mark.parametrize("name", ALONE)
def test_a_shared_keyword_changes_the_layer_or_is_refused(name, keyword):
    assert SHARED.keys() == ModelConfig.model_fields.keys() - _OF_A_MODEL | {"n_heads", "window"}
    kind, own = MIXERS.find(name), OWN_SETTINGS.get(name, {})
    assert kind.shared is not None, f"{name}: declare in Mixer.shared which settings of the model it uses"
    memory = {"chunk_size": 4, "expansion": 2} if issubclass(kind, MemoryMixer) else {}
    of_mac = {"segment": 8, "memory_tokens": 4} if name == "mac" else {}
    settings = {key: value for key, value in {**own, **of_mac, **memory}.items() if key != keyword}
    usual = {"n_heads": 4} if not own and keyword != "n_heads" and "n_heads" in (kind.shared or ()) else {}

    def layer(value):
        return mixer(name, 32, **usual, **settings, **{keyword: value})

    def internal(value):
        sections = {"memory": memory, name: own | of_mac}
        config = ModelConfig(mixers=[name], d_model=32, **{"n_heads": 4} | sections | {keyword: value})
        made = kind(config)
        initialise(made, config)
        return made

    one, other = SHARED[keyword]
    if keyword in kind.Settings.model_fields or keyword in kind.shared or keyword == "window" and name in WINDOWED:
        assert _differ(_made(layer, one), _made(layer, other))
        return
    with pytest.raises(UserError, match=f"unknown keyword '{keyword}'|^n_heads: given {one}; "):
        layer(one)
    assert not _differ(_made(internal, one), _made(internal, other)), "it would change the layer"


def test_heads_are_those_that_the_layer_was_asked_for():
    assert mixer("gated_deltanet", 64, n_heads=4).n_heads == 4
    assert mixer("gla", 16, n_heads=2).n_heads == 2
    assert mixer("deltaproduct", 64, n_heads=4).n_heads == 4
    assert mixer("retnet", 64, head_width=16).n_heads == 4


def test_a_keyword_that_a_layer_would_ignore_is_refused():
    for kind in (LMM, MAC):
        with pytest.raises(UserError, match="unknown keyword 'window'"):
            kind(16, window=4)
        assert kind(16, rule="omega", window=8).memory.gates.rule.window == 8
    with pytest.raises(
        UserError, match="MAG: keyword 'window' is a setting of the layer and of its memory's rule; give"
    ):
        MAG(16, rule="omega", window=8)
    for make, name in [(lambda: LMM(16, n_heads=4, memory={"n_heads": 2}), "n_heads"),
                       (lambda: mixer("hope", 16, n_heads=4, memory={"n_heads": 2}), "n_heads"),
                       (lambda: LMM(16, chunk_size=4, memory={"chunk_size": 2}), "chunk_size")]:  # fmt: skip
        with pytest.raises(UserError, match=f"{name}: given 4, and 2 in memory.*; give one of them"):
            make()
    assert LMM(16, n_heads=2, chunk_size=4, memory={"n_heads": 2, "chunk_size": 4}).memory.q.n_heads == 2
    two = MAC(16, n_heads=4, memory={"n_heads": 2})
    assert (two.attention.n_heads, two.memory.q.n_heads) == (4, 2)
    layer = MAG(16, window=8, memory={"rule": "omega", "omega": {"window": 2}})
    assert (layer.attention.window, layer.memory.gates.rule.window) == (8, 2)
