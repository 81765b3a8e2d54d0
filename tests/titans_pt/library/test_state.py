"""States as values, sequences that begin inside a call, and a memory's figures for each token."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.mixers import small_model
from titans_pt import (
    LMM,
    MAC,
    NeuralMemory,
    UserError,
    detach_state,
    fork_state,
    join_rows,
    load_state,
    mixer,
    move_state,
    save_state,
    take_rows,
)  # fmt: skip
from titans_pt.kernels.memory.rules import RULES
from titans_pt.layers.state import map_tensors, tensors
from titans_pt.models.mixers import MIXERS

SMALL = {"n_heads": 2, "chunk_size": 4, "depth": 2, "conv_width": 3}
CHUNK = {name: {"n_heads": 2, "chunk_size": 4} for name in ("lmm", "mac", "mag", "mal", "mab", "hope")}
"""Mixers with a memory."""
LAYERS = {
    "memory": lambda: NeuralMemory(16, **SMALL),
    "mac": lambda: MAC(16, **SMALL, segment=8, memory_tokens=4, persistent_tokens=2),
    "mamba2": lambda: mixer("mamba2", 16),
    "swa": lambda: mixer("swa", 16, n_heads=2, window=6),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]().double()


def test_reset_begins_rows_in_the_midst(layer):
    x = torch.randn(3, 11, 16, dtype=torch.float64)
    _, state = layer(x)
    more = torch.randn(3, 10, 16, dtype=torch.float64)
    reset = torch.zeros(3, 10, dtype=torch.bool)
    reset[1, 0] = reset[2, 6] = True  # row 1 restarts at once, row 2 after six tokens, row 0 continues
    y, after = layer(more, state, reset)
    goes_on, its_state = layer(more[:1], take_rows(state, torch.tensor([0])))
    torch.testing.assert_close(y[:1], goes_on)
    torch.testing.assert_close(y[1:2], layer(more[1:2])[0])
    torch.testing.assert_close(y[2:, 6:], layer(more[2:, 6:])[0])
    next_token = torch.randn(1, 1, 16, dtype=torch.float64)
    alone = layer(next_token, take_rows(after, torch.tensor([0])))[0]
    torch.testing.assert_close(alone, layer(next_token, its_state)[0])
    with pytest.raises(UserError, match=r"reset: given torch.int64 of shape \(3, 10\); allowed: torch.bool of shape"):
        layer(more, state, reset.long())
    with pytest.raises(UserError, match=r"reset: given torch.bool of shape \(3, 9\)"):
        layer(more, state, reset[:, 1:])


def test_fork_detach_and_take_rows(layer):
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    _, state = layer(x)
    twin = fork_state(state)
    places = {t.data_ptr() for t in tensors(state) if t.numel()}
    assert places.isdisjoint(t.data_ptr() for t in tensors(twin) if t.numel())
    assert any(t.requires_grad for t in tensors(twin))
    assert not any(t.requires_grad for t in tensors(detach_state(state)))
    expected = layer(x, state)[0]
    assert torch.equal(layer(x, twin)[0], expected)
    swapped = take_rows(state, torch.tensor([1, 0, 1]))
    torch.testing.assert_close(layer(x[[1, 0, 1]], swapped)[0], expected[[1, 0, 1]])


@pytest.mark.parametrize("index, message", [
    (torch.tensor([True, False]), r"index: given torch.bool of shape \(2,\); allowed: integers \(n,\)"),
    (torch.tensor([0.0]), "index: given torch.float32"),
    (0, r"index: given torch.int64 of shape \(\)"),
    ([0, 2], r"index: given \[0, 2\]; the state has no such row"),
    ([-1], r"index: given \[-1\]; the state has no such row"),
], ids=str)  # fmt: skip
def test_rows_that_cannot_be_taken(layer, index, message):
    _, state = layer(torch.randn(2, 7, 16, dtype=torch.float64))
    with pytest.raises(UserError, match=message):
        take_rows(state, index)


def test_rows_are_integers_of_any_kind(layer):
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    _, state = layer(x)
    expected = layer(x, state)[0][1:]
    for index in ([1], (1,), torch.tensor([1], dtype=torch.int8), torch.tensor([False, True]).nonzero()[:, 0]):
        torch.testing.assert_close(layer(x[1:], take_rows(state, index))[0], expected)


def test_a_state_of_integers_is_refused(layer):
    _, state = layer(torch.randn(2, 7, 16, dtype=torch.float64))
    with pytest.raises(UserError, match="dtype: given torch.int8; allowed: a floating-point type"):
        move_state(state, "cpu", torch.int8)


def test_a_state_is_saved_and_read_again(layer, tmp_path):
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    _, state = layer(x)
    save_state(state, tmp_path / "state.safetensors")
    again = load_state(tmp_path / "state.safetensors")
    assert torch.equal(layer(x, again)[0], layer(x, state)[0])
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a state file"):
        load_state(tmp_path / "broken")
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(x)[0], layer(x)[0])


def test_inspect_says_surprise_gates_and_norms():
    torch.manual_seed(0)
    memory = NeuralMemory(16, **SMALL, alpha_init=0.1).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    found = memory.inspect(x)
    assert all(getattr(found, name).shape == (2, 6, 2) for name in vars(found))
    k, v = memory.k(x)[0], memory.v(x)[0]
    theta, eta, alpha = memory.gates(x, v)
    for name, gate in (("theta", theta), ("eta", eta), ("alpha", alpha)):
        torch.testing.assert_close(getattr(found, name).double(), gate, atol=1e-6, rtol=1e-5)
    # Surprise by autograd, at the weights of the chunk's start: first M_0, then the weights after four tokens.
    weights, norm = memory.network()
    _, after_four = memory(x[:, :4])
    for t, start in ((1, [w.expand(2, *w.shape) for w in weights]), (5, after_four.memory.weights)):
        leaves = [w[1, 0].detach().requires_grad_() for w in start]
        hidden = torch.nn.functional.gelu(k[1, t, 0] @ leaves[0]) @ leaves[1]
        scale, shift = norm[0][0], norm[1][0]
        said = k[1, t, 0] + torch.nn.functional.layer_norm(hidden, (8,), scale, shift)
        loss = (said - v[1, t, 0]).square().sum()
        gradients = torch.autograd.grad(loss, leaves)
        expected = torch.cat([g.flatten() for g in gradients]).norm()
        assert found.surprise[1, t, 0].item() == pytest.approx(expected.item(), rel=1e-4)
    for t in (2, 6):
        _, state = memory(x[:, :t])
        for name, parts in (("weight_norm", state.memory.weights), ("momentum_norm", state.memory.momentum)):
            norms = sum(part.square().sum((-1, -2)) for part in parts).sqrt()
            torch.testing.assert_close(getattr(found, name)[:, t - 1].double(), norms, atol=1e-5, rtol=1e-4)


def test_inspect_goes_on_from_a_state_and_knows_resets():
    torch.manual_seed(0)
    memory = NeuralMemory(16, **SMALL)
    x = torch.randn(1, 9, 16)
    whole = memory.inspect(x)
    _, state = memory(x[:, :5])
    torch.testing.assert_close(memory.inspect(x[:, 5:], state).surprise, whole.surprise[:, 5:])
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 5] = True
    torch.testing.assert_close(memory.inspect(x, reset=reset).weight_norm[:, 5:], memory.inspect(x[:, 5:]).weight_norm)


@pytest.mark.parametrize("make", [NeuralMemory, partial(mixer, "hope")])
def test_inspect_takes_a_state_of_another_precision(make):
    layer, x = make(16, n_heads=2), torch.randn(1, 9, 16)
    _, state = layer(x[:, :5])
    found = layer.inspect(x[:, 5:], state).surprise
    torch.testing.assert_close(layer.double().inspect(x[:, 5:].double(), state).surprise, found, rtol=1e-3, atol=1e-4)


def test_inspect_in_inference_mode():
    layer = LMM(16, **SMALL)
    x = torch.randn(1, 9, 16)
    expected = layer.inspect(x).surprise
    with torch.inference_mode():
        _, state = layer(x[:, :5])
        torch.testing.assert_close(layer.inspect(x[:, 5:].clone(), state).surprise, expected[:, 5:])


def test_inspect_of_mixers():
    layer = MAC(16, **SMALL, segment=8, memory_tokens=4, persistent_tokens=2)
    x = torch.randn(2, 11, 16)
    assert layer.inspect(x).surprise.shape == (2, 11, 2)
    assert LMM(16, **SMALL).inspect(x).theta.min() > 0
    with pytest.raises(UserError, match="inspect: swa has no neural memory"):
        mixer("swa", 16, n_heads=2).inspect(x)


OTHERS = {
    "chunk_size": {"chunk_size": 2}, "expansion": {"expansion": 8}, "heads": {"n_heads": 4},
    "depth up": {"depth": 3}, "depth down": {"depth": 1},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_memory_is_refused(other, dtype):
    """C would read and write beyond the state's end."""
    x = torch.randn(2, 3, 16, dtype=dtype)
    _, state = NeuralMemory(16, **SMALL).to(dtype)(x)
    layer = NeuralMemory(16, **SMALL | OTHERS[other]).to(dtype)
    with pytest.raises(ValueError, match="initial_state (is of another memory|has read 3 tokens of a chunk)"):
        layer(x, state)


OTHER_RULES = {
    "a window after none": ({}, {"rule": "omega", "window": 4}),
    "another window": ({"rule": "omega", "window": 4}, {"rule": "omega", "window": 8}),
    "none after a window": ({"rule": "omega", "window": 4}, {}),
    "caching after none": ({}, {"caching": {"segment": 4}}),
    "none after caching": ({"caching": {"segment": 4}}, {}),
    "fewer caches": ({"caching": {"segment": 4, "slots": 3}}, {"caching": {"segment": 4, "slots": 1}}),
    "another convolution": ({"conv_width": 2}, {"conv_width": 4}),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHER_RULES)
def test_a_state_of_another_rule_caching_or_convolution_is_refused(change):
    one, two = OTHER_RULES[change]
    x = torch.randn(2, 13, 16)
    _, state = NeuralMemory(16, **SMALL | one)(x)
    layer = NeuralMemory(16, **SMALL | two)
    if change == "a window after none":  # the window starts here
        assert layer(x, state)[0].isfinite().all()
        return
    with pytest.raises(ValueError, match="state"):
        layer(x, state)


HIERARCHY = {"chunk": 4, "shard": 8, "locals": [2, 4]}
OTHER_LAYERS = {
    "mag": ("mag", {"window": 4}, {"window": 2048}),
    "mal": ("mal", {"window": 4}, {"window": 8}),
    "mab": ("mab", {"window": 8}, {"window": 4}),
    "liza": ("liza", {"window": 4}, {"window": 8}),
    "swa": ("swa", {"window": 8}, {"window": 4}),
    "sinks": ("swa", {"window": 4}, {"window": 4, "attention": {"sinks": 2}}),
    "no window": ("attention", {"attention": {"kv_heads": 1}}, {}),
    "mac": ("mac", {"segment": 8, "memory_tokens": 4}, {"segment": 4, "memory_tokens": 2}),
    "memory tokens": ("mac", {"segment": 8, "memory_tokens": 2}, {"segment": 8, "memory_tokens": 4}),
    "locals": ("lmm", {"hierarchy": HIERARCHY}, {"hierarchy": HIERARCHY | {"locals": [2]}}),
    "local chunk": ("lmm", {"hierarchy": HIERARCHY}, {"hierarchy": HIERARCHY | {"locals": [2, 3]}}),
    "chunk": ("lmm", {"hierarchy": HIERARCHY}, {"hierarchy": HIERARCHY | {"chunk": 2}}),
    "shard": ("lmm", {"hierarchy": HIERARCHY}, {"hierarchy": HIERARCHY | {"shard": 4}}),
    "projection": ("lmm", {"hierarchy": HIERARCHY}, {"hierarchy": HIERARCHY | {"projection": False}}),
}
"""A mixer and two settings of it whose states do not fit each other after 15 tokens."""


@pytest.mark.parametrize("case", OTHER_LAYERS)
def test_a_state_of_another_layer_is_refused(case):
    name, *settings = OTHER_LAYERS[case]
    chunk = CHUNK.get(name, {})
    one, other = (mixer(name, 16, **{"n_heads": 2} | chunk | own) for own in settings)
    x = torch.randn(2, 15, 16)
    state = one(x)[1]
    one(x[:, :1], state)
    with pytest.raises(ValueError, match="^state: given one of another "):
        other(x[:, :1], state)


def without_gradient(layer, length, width=16):
    """Parameters without a gradient after a call of ``length`` tokens, at the start and after a state."""
    x, found = torch.randn(2, length, width), []
    for state in (None, detach_state(layer(torch.randn(2, 5, width))[1])):
        y, _ = layer(x, state)
        gradients = torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
        names = (name for name, _ in layer.named_parameters())
        found += [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    return found


@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("rule", RULES.built_in())
def test_inside_a_chunk_every_parameter_of_a_memory_has_a_gradient(rule, length):
    """DistributedDataParallel waits for every gradient, also in a call that reads nothing that it writes."""
    variants = [{}, {"forgetting": False}, {"momentum": False}, {"writes": False}, {"caching": {"segment": 4}}]
    if rule == "titans":
        variants += [{"alpha": "channel"}, {"alpha": "channel", "forgetting": False}]
    for settings in variants:
        layer = NeuralMemory(16, n_heads=2, chunk_size=4, rule=rule, **settings)
        assert not without_gradient(layer, length), settings


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", [name for name in MIXERS.built_in() if name not in ("hgrn2", "rwkv7", "rmt")])
def test_inside_a_chunk_every_parameter_of_a_mixer_has_a_gradient(name, length):
    settings = {"mac": {"segment": 8, "memory_tokens": 4}}.get(name, {})
    assert not without_gradient(mixer(name, 16, **settings, **CHUNK.get(name, {})), length)
    if name in CHUNK:
        assert not without_gradient(mixer(name, 16, rule="muon", **settings, **CHUNK[name]), length)
    if name in ("lmm", "mag", "mal"):
        hierarchy = {"chunk": 4, "shard": 8, "locals": [2]}
        assert not without_gradient(mixer(name, 16, hierarchy=hierarchy, **CHUNK[name]), length)


def test_inside_a_period_every_parameter_of_a_model_has_a_gradient():
    model = small_model(["hope", "lmm"], mlp_periods=[4, 8])
    model(torch.randint(0, 50, (2, 4)))[0].square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_a_state_keeps_nothing_else_alive(layer):
    with torch.no_grad():
        _, state = layer(torch.randn(1, 600, 16, dtype=torch.float64))
    behind = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(state)}
    assert sum(behind.values()) <= 2 * sum(t.numel() * t.element_size() for t in tensors(state))


def test_after_a_state_every_parameter_has_a_gradient(layer):
    """DistributedDataParallel waits for every gradient; parameters that only a start uses have gradient 0."""
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    _, state = layer(x)
    y, _ = layer(x, detach_state(state))
    gradients = torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
    assert all(gradient is not None for gradient in gradients)


def test_inspect_begins_again_at_every_segment_of_a_fresh_memory():
    torch.manual_seed(0)
    memory = NeuralMemory(16, **SMALL, alpha_init=0.1, caching={"segment": 4, "slots": 2, "fresh": True}).double()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[1, 6] = True
    for marks in (None, reset):
        found = memory.inspect(x, reset=marks).weight_norm
        _, state = memory(x, reset=marks)
        norms = sum(part.square().sum((-1, -2)) for part in state.memory.weights).sqrt()
        torch.testing.assert_close(found[:, -1].double(), norms, atol=1e-5, rtol=1e-5)
        _, middle = memory(x[:, :7], reset=None if marks is None else marks[:, :7])
        rest = memory.inspect(x[:, 7:], middle, reset=None if marks is None else marks[:, 7:]).weight_norm
        torch.testing.assert_close(rest, found[:, 7:])


def test_a_state_is_moved(layer):
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    _, state = layer(x)
    elsewhere = move_state(state, "meta")
    assert all(t.device.type == ("meta" if t.is_floating_point() else "cpu") for t in tensors(elsewhere))
    with pytest.raises(UserError, match=r"^state: given one on meta; x is on cpu; pass move_state\(state, 'cpu'\)"):
        layer(x, elsewhere)
    single = layer.float()(x.float(), move_state(state, "cpu", torch.float32))[0]
    torch.testing.assert_close(single.double(), layer.double()(x, move_state(state, "cpu"))[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in MIXERS.built_in() if name not in ("hgrn2", "rwkv7", "rmt")])
def test_training_goes_on_from_a_state_of_inference_mode(name):
    layer = mixer(name, 16, **CHUNK.get(name, {}))
    x, more = torch.randn(2, 2, 7, 16)
    with torch.inference_mode():
        _, read = layer(x)
    y, after = layer(more, read)
    y.square().sum().backward()
    torch.testing.assert_close(y, layer(more, fork_state(read))[0])
    assert not any(t.is_inference() for t in tensors(after)) and any(t.is_inference() for t in tensors(read))


@pytest.mark.parametrize("name", MIXERS.built_in())
def test_a_row_that_begins_again_forgets_infinities_and_nan(name):
    model = small_model([name])
    broken = copy.deepcopy(model)
    broken.embedding.weight.data[51] = torch.nan
    ids, before = torch.randint(0, 50, (2, 6)), torch.randint(0, 50, (2, 9))
    before[1, 7] = 51
    _, read = broken(before)
    assert not all(t.isfinite().all() for t in tensors(read))
    reset = torch.tensor([[False], [True]]) & (torch.arange(6) == 0)
    y, after = model(ids, read, reset)
    torch.testing.assert_close(y[1:], model(ids[1:])[0])
    assert all(t.isfinite().all() for t in tensors(after))


def test_a_layers_row_that_begins_again_forgets_nan(layer):
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    bad = x.clone()
    bad[0, 3] = torch.nan
    reset = torch.tensor([[True], [False]]) & (torch.arange(7) == 0)
    torch.testing.assert_close(layer(x, layer(bad)[1], reset)[0][:1], layer(x[:1])[0])


def test_training_of_a_model_goes_on_from_a_state_of_inference_mode():
    model = small_model(["mac", "lmm"])
    with torch.inference_mode():
        _, read = model(torch.randint(0, 50, (2, 9)))
    model(torch.randint(0, 50, (2, 5)), read)[0].square().sum().backward()


@pytest.mark.parametrize("name", [name for name in MIXERS.built_in() if name not in ("hgrn2", "rwkv7", "rmt")])
def test_what_is_no_state_of_the_layer_is_one_line(name):
    layer = mixer(name, 16, **CHUNK.get(name, {}))
    x = torch.randn(2, 7, 16)
    other = mixer("swa" if name.startswith("ttt") else "ttt_mlp", 16)
    for wrong in (layer(x), x, other(x)[1]):
        with pytest.raises(UserError, match=rf"^state: given a \w+; allowed: {type(layer).__name__}'s own, a \w+State"):
            layer(x, wrong)


def test_a_layer_whose_states_have_no_declared_class_takes_any(monkeypatch):
    monkeypatch.setattr(MIXERS, "_found", dict(MIXERS._found))

    @MIXERS.register
    class Undeclared(MIXERS.find("swa")):
        name = "undeclared"

        def forward(self, x, state=None, documents=None):
            return super().forward(x, state, documents)

    layer, x = mixer("undeclared", 16), torch.randn(2, 7, 16)
    y, state = layer(x)
    layer(x, state)


def test_streams_join_and_leave(layer):
    """The states of two calls become one, and the first row leaves."""
    x, more = torch.randn(3, 7, 16, dtype=torch.float64), torch.randn(3, 5, 16, dtype=torch.float64)
    both = join_rows([layer(x[:1])[1], layer(x[1:])[1]])
    expected, state = layer(more, layer(x)[1])
    found, after = layer(more, both)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer(x[1:], take_rows(after, torch.tensor([1, 2])))[0], layer(x, state)[0][1:])
    with pytest.raises(UserError, match="^states: given none"):
        join_rows([])


@pytest.mark.parametrize("part", ["memory", "q"])
def test_a_state_on_another_device_is_an_error(part):
    """C does not check addresses: it would read invalid memory."""
    memory = NeuralMemory(16, **SMALL)
    x = torch.randn(1, 5, 16)
    with torch.no_grad():
        _, state = memory(x)
        elsewhere = replace(state, **{part: map_tensors(getattr(state, part), lambda t: t.to("meta"))})
        with pytest.raises((UserError, ValueError, RuntimeError, NotImplementedError)):
            y, after = memory(x, elsewhere)
            assert y.device.type == "cpu" and not any(t.is_meta for t in (*after.memory.weights, after.q))
