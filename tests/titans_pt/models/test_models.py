"""Every model is causal, keeps rows and documents independent, and can be streamed with any cuts; in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.mixers import form
from titans_pt.config import Config, MemoryConfig, ModelConfig
from titans_pt.config.checks import checked_model
from titans_pt.errors import UserError
from titans_pt.layers.state import tensors
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS

MODELS = {name: [name] for name in ("lmm", "mac", "mag", "mal", "mab", "attention", "swa")} | {
    "hybrid": ["lmm", "swa", "mac"]
}
OURS = [name for name in MIXERS.names() if MIXERS.find(name).__module__ == f"titans_pt.models.mixers.{name}"]
"""The built-in mixers, without those that other tests of a process register."""
T = 41  # ragged for chunk 4, segment 8 and window 6


def small(mixers, **memory):
    config = ModelConfig(
        mixers=mixers, vocab_size=50, d_model=16, n_layers=len(mixers) if len(mixers) > 1 else 2, n_heads=2,
        mlp_hidden=24, window=6, segment=8, memory_tokens=4, persistent_tokens=3,
        memory=MemoryConfig(**{"chunk_size": 4, "expansion": 2, "save_every": 2} | memory),
    )  # fmt: skip
    torch.manual_seed(0)
    model = build_model(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # move gates and norms away from their symmetric start
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request):
    return small(MODELS[request.param])


def tokens(rows=2, length=T, seed=0):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "lmm-linear": (["lmm"], {"depth": 1}),
    "mab-as-converted": (["mab"], {"depth": 1, "norm": False, "residual": False}),
    "lmm-deep-per-layer": (["lmm"], {"depth": 4, "per_layer_gates": True}),
    "mac-per-layer": (["mac"], {"per_layer_gates": True}),
    "mac-linear-plain": (["mac"], {"depth": 1, "norm": False, "residual": False}),
    "lmm-to-start": (["lmm"], {"forget_to": "start", "gates": "hard", "alpha_init": 0.2}),
    "mac-to-start": (["mac"], {"forget_to": "start", "gates": "hard", "alpha_init": 0.2}),
    "mag-to-start": (["mag"], {"forget_to": "start", "alpha_init": 0.2, "depth": 1, "per_layer_gates": True}),
    "mal-to-start": (["mal"], {"forget_to": "start", "alpha_init": 0.2, "depth": 3}),
    "mag-no-momentum": (["mag"], {"momentum": False, "forgetting": False}),
    "lmm-channels": (["lmm"], {"alpha": "channel", "alpha_rank": 3, "per_layer_gates": True, "alpha_init": 0.2}),
    "mac-channels": (["mac"], {"alpha": "channel", "forget_to": "start", "gates": "hard", "alpha_init": 0.2}),
    "lmm-free-steps": (["lmm"], {"theta": "free", "per_layer_gates": True}),
}


def check_causal(model, place, state=None):
    ids = tokens()
    before, _ = model(ids, state)
    changed = ids.clone()
    changed[0, place] = (changed[0, place] + 1) % 50
    after, _ = model(changed, state)
    assert torch.equal(after[0, :place], before[0, :place]), "the future leaked"
    assert torch.equal(after[1], before[1]), "another row changed"
    assert not torch.equal(after[0, place:], before[0, place:])


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 7, 8, 21, 40])
def test_causal_and_rows_independent(model, place):
    check_causal(model, place)


@torch.no_grad()
def test_causal_from_a_state(model):
    _, state = model(tokens(length=13, seed=5))
    check_causal(model, 18, state)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_causal_and_streaming(variant):
    mixers, memory = VARIANTS[variant]
    model = small(mixers, **memory)
    check_causal(model, 18)
    check_streaming(model, [5, 6, 20])
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[0, 9] = reset[1, 21] = reset[1, 37] = True
    check_streaming(model, [5, 6, 20], reset)


def check_streaming(model, cuts, reset=None):
    ids = tokens()
    whole, _ = model(ids, reset=reset)
    pieces, state = [], None
    for a, b in zip([0, *cuts], [*cuts, T], strict=True):
        logits, state = model(ids[:, a:b], state, None if reset is None else reset[:, a:b])
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, T - 1), max_size=5, unique=True).map(sorted), resets=st.booleans())
@torch.no_grad()
def test_streaming_in_any_cuts(model, cuts, resets):
    reset = torch.rand(2, T, generator=torch.Generator().manual_seed(len(cuts))) < 0.1
    check_streaming(model, cuts, reset if resets else None)


@torch.no_grad()
def test_token_by_token(model):
    check_streaming(model, list(range(1, T)))


@torch.no_grad()
@pytest.mark.parametrize("mixer", OURS)
def test_a_state_goes_on_in_another_precision(mixer):
    """A state that a GPU saved in bf16 can be continued on a CPU in fp32, and the other way round."""
    sizes = {"mixers": [mixer], "vocab_size": 50, "d_model": 16, "n_heads": 2, "n_layers": 1, "mlp_hidden": 24}
    settings = {"window": 6, "persistent_tokens": 3, "memory": {"chunk_size": 4}}
    own = {"mac": {"segment": 8}, "rmt": {"segment": 8}} | {"mamba2": {"head_width": 8}}
    words = {"model": sizes | settings | ({mixer: own[mixer]} if mixer in own else {}), "data": {"seq_len": 64}}
    torch.manual_seed(0)
    whole = build_model(checked_model(Config.model_validate(words)).model).eval()
    half, double = copy.deepcopy(whole).to(torch.bfloat16), copy.deepcopy(whole).double()
    ids = tokens(length=40)
    for before, after in ((whole, half), (half, whole), (whole, double), (double, whole)):
        _, state = before(ids[:, :21])
        got, end = after(ids[:, 21:], state)
        expected, own_end = after(ids[:, 21:], after(ids[:, :21])[1])
        assert (got - expected).abs().max() < 0.03 * expected.abs().max()
        if half in (before, after):
            assert [t.dtype for t in tensors(end)] == [t.dtype for t in tensors(own_end)]


@torch.no_grad()
def test_resets_equal_separate_rows(model):
    ids = tokens()
    starts = [[0, 5, 19, 20], [0, 11, 33]]
    reset = torch.zeros(2, T, dtype=torch.bool)
    for row, places in enumerate(starts):
        reset[row, places[1:]] = True
    packed, _ = model(ids, reset=reset)
    for row, places in enumerate(starts):
        for a, b in zip(places, [*places[1:], T], strict=True):
            alone, _ = model(ids[row : row + 1, a:b])
            torch.testing.assert_close(packed[row : row + 1, a:b], alone, rtol=0, atol=1e-9)


@torch.no_grad()
def test_last_only(model):
    whole, _ = model(tokens())
    last, _ = model(tokens(), last_only=True)
    torch.testing.assert_close(last, whole[:, -1:], rtol=0, atol=1e-12)


def test_every_parameter_learns(model):
    model.zero_grad()
    logits, _ = model(tokens())
    logits.square().sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


def test_activation_checkpointing_changes_nothing(model):
    ids, grads = tokens(length=20), []
    model.train()
    for on in (False, True):
        model.zero_grad()
        model.blocks.set_activation_checkpointing(on)
        model(ids)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    model.blocks.set_activation_checkpointing(False)
    model.eval()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ids, reset, message", [
    (torch.zeros(2, 0, dtype=torch.int64), None, r"ids: given shape \(2, 0\)"),
    (torch.zeros(0, 5, dtype=torch.int64), None, r"ids: given shape \(0, 5\)"),
    (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.bool), r"reset: given shape \(1, 5\)"),
])  # fmt: skip
def test_shapes_that_cannot_be(ids, reset, message):
    with pytest.raises(ValueError, match=message):
        small(["lmm"])(ids, reset=reset)


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "attention", "rmt"])
def test_a_state_of_other_rows(mixer):
    model = small([mixer])
    _, state = model(tokens())
    with pytest.raises(ValueError, match="state: given one of 2 rows; the input has 1"):
        model(tokens(rows=1), state)


@pytest.mark.parametrize("changes, error, message", [
    ({"mac": {"segment": 8, "memory_tokens": 16}}, UserError,
     "^model.mac.memory_tokens: given 16; must divide segment=8$"),
    ({"memory": {"n_heads": 16}}, ValueError, "n_heads: given 16; .* LayerNorm"),
    ({"memory": {"n_heads": 3}}, ValueError, "n_heads: given 3; must divide d_model=16"),
    ({"n_heads": 16, "memory": {"n_heads": 2}}, ValueError, "n_heads: given 16; .* even width"),
])  # fmt: skip
def test_sizes_that_do_not_fit_without_a_file_of_settings(changes, error, message):
    with pytest.raises(error, match=message):
        build_model(ModelConfig(**{"mixers": ["mac"], "d_model": 16, "n_heads": 2, "vocab_size": 9} | changes))


@torch.no_grad()
def test_a_state_of_another_model_is_refused():
    """In one line, whatever the two models are, unless their states look alike."""
    models = {name: small([name]) for name in OURS}
    states = {name: model(tokens())[1] for name, model in models.items()}
    alike = {(name, other) for name in OURS for other in OURS if form(states[name]) == form(states[other])}
    # No convolution in these two: they read the memory alone.
    alike |= {(name, other) for name in ("hgrn2", "linear_attention") for other in ("deltanet", "kda", "gdn2", "rwkv7")}
    for name, model in models.items():
        for other in OURS:
            if (name, other) not in alike:
                with pytest.raises(ValueError, match=r"^state: given|initial_state|memory:") as caught:
                    model(tokens(length=3), states[other])
                assert "\n" not in str(caught.value), (name, other)
