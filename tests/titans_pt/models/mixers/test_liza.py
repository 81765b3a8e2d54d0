"""LiZA against its formula, token by token, in float64."""

import pytest
import torch
from torch.nn.functional import silu

from tests.helpers.mixers import small_model
from titans_pt.config.files import load_config
from titans_pt.errors import UserError

D, GROUP = 8, 2
same = {"rtol": 1e-9, "atol": 1e-11}


def liza(**own):
    model = small_model(["liza"], n_layers=1, attention={"kv_heads": 2, "bias": True, "sinks": 2}, liza=own)
    return model.blocks[0].mixer


def delta_rule(q, k, v):
    """Outputs (T, H D) of the delta rule for projected q (T, H, D), k (T, K, D), v (T, K, D)."""
    found = torch.zeros_like(q)
    for h in range(q.shape[1]):
        S, raw = q.new_zeros(D, D), k[:, h // GROUP]
        for t in range(len(q)):
            beta = torch.sigmoid(sum(raw[max(t - back, 0)] for back in (0, 1, 2)) / 3)
            key, query = (silu(x) / (silu(x).square().sum() + 1e-6).sqrt() for x in (raw[t], q[t, h]))
            error = v[t, h // GROUP] / D**0.5 - S.T @ key
            S = S + torch.outer(beta * key, error)
            found[t, h] = S.T @ query
    return found.flatten(-2)


@torch.no_grad()
@pytest.mark.parametrize("cross_gate", [False, True])
def test_it_computes_its_formula(cross_gate):
    mixer, x = liza(mix=0.3, cross_gate=cross_gate), torch.randn(2, 11, 32, dtype=torch.float64)
    q, (k, v) = mixer.attention.queries(x), mixer.attention.keys_values(x)
    o = torch.stack([delta_rule(*row) for row in zip(q, k, v, strict=True)])
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    base, added = 0.7 * mixer.limited(x), 0.3 * mixer.out(o)
    expected = base + added + (base * added if cross_gate else 0)
    torch.testing.assert_close(mixer(x)[0], expected, **same)


@pytest.mark.parametrize(("warmup", "mixes"), [(0.5, [0.0, 0.2, 0.4, 0.4]), (0.0, [0.4] * 4)])
def test_the_mix_rises(warmup, mixes):
    mixer = liza(mix=0.4, mix_warmup=warmup)
    found = []
    for done in (0.0, 0.25, 0.5, 1.0):
        mixer.set_progress(done)
        found.append(mixer.mix.item())
    assert found == pytest.approx(mixes)


@pytest.mark.parametrize(("words", "message"), [
    (["model.liza.mix=1.5"], "model.liza.mix: given 1.5"),
    (["model.window=1000"], "model.window: given 1000; at most data.seq_len="),
])  # fmt: skip
def test_what_does_not_fit_is_refused(tiny, words, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny(model={"mixers": ["liza"]}), words)
