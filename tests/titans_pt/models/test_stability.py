"""Long and hostile streams in bf16: everything stays finite, and the memory's weights stay bounded."""

import pytest
import torch
import torch.nn.functional as F

from titans_pt.config import MemoryConfig, ModelConfig
from titans_pt.kernels.memory import MemoryState, neural_memory
from titans_pt.models import build_model
from titans_pt.training.probes import find

VOCABULARY, PIECE = 64, 5000
VARIANTS = {
    "lmm": (["lmm"], {}),
    "lmm-chunk-64": (["lmm"], {"chunk_size": 64}),
    "lmm-linear": (["lmm"], {"depth": 1}),
    "lmm-deep": (["lmm"], {"depth": 4}),
    "lmm-per-layer": (["lmm"], {"per_layer_gates": True}),
    "lmm-never-forgets": (["lmm"], {"forgetting": False}),
    "lmm-no-momentum": (["lmm"], {"momentum": False}),
    "lmm-largest-steps": (["lmm"], {"theta_init": 0.99, "eta_init": 0.01}),
    "lmm-most-momentum": (["lmm"], {"theta_init": 0.99, "eta_init": 0.99}),
    "lmm-forgets": (["lmm"], {"forget_to": "start", "gates": "hard", "alpha_init": 0.2}),
    "lmm-deep-forgets": (["lmm"], {"forget_to": "start", "gates": "hard", "alpha_init": 0.2, "depth": 4}),
    "lmm-linear-forgets": (["lmm"], {"forget_to": "start", "gates": "hard", "alpha_init": 0.2, "depth": 1}),
    "mac": (["mac"], {}),
    "mag": (["mag"], {}),
    "mal": (["mal"], {}),
}


def build(variant, **changes):
    mixers, memory = VARIANTS[variant]
    torch.manual_seed(0)
    return build_model(
        ModelConfig(
            mixers=mixers, vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, window=64, segment=64,
            memory_tokens=32, persistent_tokens=8, memory=MemoryConfig(**memory | changes),
        )
    )  # fmt: skip


def train(model, steps=20):
    """Train on sequences whose second half repeats the first, which a memory can learn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        half = torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(step))
        ids = torch.cat([half, half], 1)
        logits, _ = model(ids)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def largest_norms(model, tokens, piece=PIECE):
    """Largest Frobenius norm of any weight or momentum matrix after each piece of the stream ``tokens`` (T,)."""
    state, norms = None, []
    for ids in tokens.split(piece):
        logits, state = model(ids[None], state)
        assert logits.isfinite().all(), "logits are not finite"
        memories = list(find(state, MemoryState))
        norms.append(max(float(w.norm(dim=(-2, -1)).max()) for s in memories for w in (*s.weights, *s.momentum)))
    return norms


def start_norm(model):
    starts = [p.detach() for name, p in model.named_parameters() if ".network.weight_" in name]
    return max(float(p.norm(dim=(-2, -1)).max()) for p in starts)


def check(model, length):
    model = model.bfloat16().eval()
    tokens = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1))
    norms = largest_norms(model, tokens)
    # Weights do not grow: they keep their initial scale, early and late.
    assert max(norms) < 3 * start_norm(model), norms


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal", "lmm-deep", "lmm-deep-forgets", "lmm-largest-steps"])
def test_ten_thousand_random_tokens(variant):
    check(build(variant), 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hundred_thousand_random_tokens(variant, trained):
    model = build(variant)
    if trained:
        train(model)
    check(model, 100_000)


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
@pytest.mark.parametrize("stream, forget_to", [
    ("constant", "start"), ("constant", "zero"), ("alternating", "start"), ("one long repetition", "start"),
])  # fmt: skip
def test_hostile_streams(variant, stream, forget_to):
    """Weights stay bounded when a stream repeats.

    One token for ever leaves nothing to learn. Forgetting to zero then shrinks the weights until the LayerNorm's eps
    matters, and one step makes them large. They grow no further (u is at most of the order 1 / sqrt(eps)) and shrink
    again. Forgetting to the start keeps them constant.
    """
    period = {"constant": 1, "alternating": 2, "one long repetition": 40}[stream]
    model = build(variant, forget_to=forget_to).bfloat16().eval()
    tokens = torch.arange(period).repeat(3000 // period)
    most = 100 if stream == "constant" and forget_to == "zero" else 3
    assert max(largest_norms(model, tokens, 1000)) < most * start_norm(model)


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("same_key", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
def test_huge_values_stay_finite(scale, same_key, chunk):
    """Values are far larger than a normalised model's, and gates are the largest that the layer allows."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2000, 2, 16, generator=gen) for _ in range(3))
    if same_key:
        k = k[:, :1].expand_as(k)
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    gates = [torch.full((1, 2000, 2), g) for g in (min(0.1, 1.9 / chunk) * 0.1, 0.9, 0.0)]
    weights = torch.randn(2, 16, 32, generator=gen), torch.randn(2, 32, 16, generator=gen)
    norm = torch.ones(2, 16), torch.zeros(2, 16)
    out, state = neural_memory(q, k, scale * v, *gates, weights, norm=norm, chunk_size=chunk, output_final_state=True)
    assert out.isfinite().all()
    assert all(w.isfinite().all() for w in (*state.weights, *state.momentum))
