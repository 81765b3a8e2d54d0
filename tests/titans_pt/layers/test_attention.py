"""Attention's settings against their definition, token by token, in float64; streams with any cuts; FLOPs and sizes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.config import ModelConfig
from titans_pt.layers.attention import Attention
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import attention_flops, product
from titans_pt.layers.state import state_bytes
from titans_pt.models import build_model

LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq": 1.0, "high_freq": 4.0, "original_length": 64}
KINDS = {
    "shared": {"kv_heads": 2},
    "one": {"kv_heads": 1, "bias": True},
    "wide": {"head_width": 10, "bias": True},
    "sinks": {"sinks": 3},
    "normed": {"kv_heads": 2, "bias": True, "qk_norm": True},
    "sinks-shared": {"sinks": 1, "kv_heads": 1, "bias": True},
    "linear": {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    "llama3": {"kv_heads": 2, "rope_scaling": LLAMA3},
}
T, WINDOW = 23, 6


def layer(window=WINDOW, **own):
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, n_heads=4, rope_base=100.0, attention=own)
    attention = Attention(config, window).double()
    with torch.no_grad():
        for p in attention.parameters():
            p.normal_(std=0.4)
    return attention


def inputs(rows=2, length=T):
    return torch.randn(rows, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def frequencies(width, scaling):
    """Angle per token of each pair, as in transformers' modeling_rope_utils."""
    plain = [100.0 ** (-2 * i / width) for i in range(width // 2)]
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    found = []
    for f in plain:
        wavelength, old = 2 * math.pi / f, scaling.original_length
        if wavelength < old / scaling.high_freq:
            found.append(f)
        elif wavelength > old / scaling.low_freq:
            found.append(f / scaling.factor)
        else:
            smooth = (old / wavelength - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
            found.append((1 - smooth) * f / scaling.factor + smooth * f)
    return found


def by_definition(attention, x, starts=None):
    """Compute attention for one query and one head at a time; starts (B, T) bool."""
    width, group = attention.head_width, attention.n_heads // attention.kv_heads
    angles = torch.tensor(frequencies(width, attention.rope_scaling), dtype=torch.float64)

    def turned(y, place):
        z = torch.complex(y[: width // 2], y[width // 2 :]) * torch.polar(torch.ones_like(angles), angles * place)
        return torch.cat([z.real, z.imag])

    def normed(y, norm):
        return y if norm is None else norm.weight * y / (y.square().mean() + norm.eps).sqrt()

    rows = []
    for row, tokens in enumerate(x):
        outputs = []
        for i in range(len(tokens)):
            first = max([0, *(t for t in range(i + 1) if starts is not None and starts[row, t])])
            window = attention.window or T
            seen = [j for j in range(first, i + 1) if j > i - window or j < first + attention.sinks]
            heads = []
            for head in range(attention.n_heads):
                own, shared = (slice(n * width, (n + 1) * width) for n in (head, head // group))
                q = turned(normed(attention.q(tokens[i])[own], attention.q_norm), i)
                keys = [turned(normed(attention.k(tokens[j])[shared], attention.k_norm), j) for j in seen]
                scores = torch.stack([q @ k for k in keys]) / width**0.5
                values = torch.stack([attention.v(tokens[j])[shared] for j in seen])
                heads.append(scores.softmax(0) @ values)
            outputs.append(torch.cat(heads))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_definition(kind, window):
    attention, x = layer(window, **KINDS[kind]), inputs()
    torch.testing.assert_close(attention(x)[0], by_definition(attention, x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_sinks_of_documents():
    """Each document has its own sinks, wherever it begins in the row."""
    attention, x = layer(3, sinks=2), inputs()
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[0, [4, 5, 14]] = starts[1, 9] = True
    y, _ = attention(x, documents=documents(starts))
    torch.testing.assert_close(y, by_definition(attention, x, starts), rtol=0, atol=1e-10)


def documents(starts):
    return None if starts is None else Documents.of(starts, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), window=st.sampled_from([None, 1, WINDOW, 40]),
       cuts=st.lists(st.integers(1, T - 1), max_size=6), cut_rows=st.booleans(),
       seed=st.integers(0, 10**6))  # fmt: skip
@torch.no_grad()
def test_any_cuts_are_one_pass(kind, window, cuts, cut_rows, seed):
    attention, x = layer(window, **KINDS[kind]), inputs()
    starts = torch.rand(2, T, generator=torch.Generator().manual_seed(seed)) < 0.15 if cut_rows else None
    whole, end = attention(x, documents=documents(starts))
    state, outputs = None, []
    places = [0, *sorted(set(cuts)), T]
    for begin, stop in zip(places, places[1:], strict=False):
        here = None if starts is None else starts[:, begin:stop]
        y, state = attention(x[:, begin:stop], state, documents(here))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(state.k, end.k, rtol=0, atol=1e-12)


def test_what_is_counted():
    """FLOPs and the cache's size follow the actual number of heads."""
    plain, shared = layer(), layer(kv_heads=1)
    for attention, keys in ((plain, 4), (shared, 1)):
        expected = product(32, 32) + 2 * product(32, 8 * keys) + attention_flops(32, 5.5)
        assert attention.flops(5.5).total == pytest.approx(expected.total)
    caches = [state_bytes(attention(inputs())[1]) for attention in (plain, shared)]
    assert caches == [2 * 2 * (WINDOW - 1) * 32 * 8, 2 * 2 * (WINDOW - 1) * 8 * 8]
    sinks = layer(sinks=3)
    assert state_bytes(sinks(inputs())[1]) == 2 * 2 * (3 + WINDOW - 1) * 32 * 8
    assert sinks.seen(T) == sum(min(i + 1, WINDOW + 3) for i in range(T)) / T
    wide = layer(head_width=10)
    assert (wide.width, wide(inputs())[0].shape[-1]) == (40, 40)
    assert wide.flops(0).forward == 3 * 2 * 32 * 40


def test_the_embeddings_scale():
    sizes = dict(mixers=["attention"], vocab_size=20, d_model=16, n_layers=1, n_heads=2)
    models = []
    for scale in (None, 4.0, 1.0):
        torch.manual_seed(0)
        models.append(build_model(ModelConfig(**sizes, embedding_scale=scale)))
    ids = torch.arange(6)[None]
    usual, same, other = (model(ids)[0] for model in models)
    assert torch.equal(usual, same) and not torch.equal(usual, other)
    with torch.no_grad():
        models[2].embedding.weight *= 4.0
        models[2].head.weight = models[0].head.weight
    torch.testing.assert_close(models[2](ids)[0], usual)


@pytest.mark.parametrize(("own", "message"), [
    ({"kv_heads": 3}, r"attention.kv_heads: given 3; must divide n_heads=4"),
    ({"head_width": 5}, "even width"),
])  # fmt: skip
def test_what_does_not_fit(own, message):
    with pytest.raises(ValueError, match=message):
        layer(**own)
