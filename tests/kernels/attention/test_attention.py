"""Every form of attention against its definition; FlashAttention's merged parts against SDPA's masks."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from titans_pt.kernels import native
from titans_pt.kernels.attention import Prefix, causal_attention, masked_attention, segment_attention, token

B, H, D = 2, 3, 8


def rand(*shape, seed=0, device="cpu", dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(device, dtype).requires_grad_()


def by_definition(q, k, v, sees, prefix=None):
    """Compute softmax attention in full; sees: bool mask (B, T, S)."""
    k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    if prefix is not None:
        prefix = Prefix(prefix.q, *(x.repeat_interleave(H // x.shape[2], 2) for x in (prefix.k, prefix.v)))
    scores = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(~sees[:, None], -torch.inf)
    if prefix is not None:
        scores = torch.cat([torch.einsum("bthd,bphd->bhtp", prefix.q, prefix.k), scores], -1)
        v = torch.cat([prefix.v, v], 1)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores * D**-0.5, -1), v)


def equal(outputs, leaves, rtol=1e-9):
    """Assert that all outputs equal the first, in values and in gradients for one random gradient of the output."""
    gen = torch.Generator().manual_seed(9)
    up = torch.randn(outputs[0].shape, generator=gen, dtype=torch.float64).to(outputs[0])
    grads = [torch.autograd.grad(o, leaves, up, retain_graph=True) for o in outputs]
    for out, grad in zip(outputs[1:], grads[1:], strict=True):
        torch.testing.assert_close(out, outputs[0], rtol=rtol, atol=rtol)
        for mine, want in zip(grad, grads[0], strict=True):
            torch.testing.assert_close(mine, want, rtol=rtol, atol=rtol)


def make_prefix(q, length, seed=5, kv_heads=H):
    if not length:
        return None, []
    plain = rand(*q.shape, seed=seed, device=q.device, dtype=q.dtype)
    k, v = (rand(B, length, kv_heads, D, seed=seed + i, device=q.device, dtype=q.dtype) for i in (1, 2))
    return Prefix(plain, k, v), [plain, k, v]


def bounds_of(first):
    """Starts of documents with the rows laid end to end, from first (B, T) of whole rows; padded with B * T."""
    begins = (first == torch.arange(first.shape[1], device=first.device)).flatten().nonzero().flatten()
    return F.pad(begins, (0, 3), value=first.numel()).to(torch.int32)


@settings(max_examples=60, deadline=None)
@given(T=st.integers(1, 40), past=st.integers(0, 20), window=st.none() | st.integers(1, 50), prefix=st.integers(0, 5),
       sinks=st.integers(0, 4), documents=st.booleans(), kv_heads=st.sampled_from([1, H]),
       seed=st.integers(0, 10**6))  # fmt: skip
def test_causal(T, past, window, prefix, sinks, documents, kv_heads, seed):
    q = rand(B, T, H, D, seed=seed)
    k, v = (rand(B, past + T, kv_heads, D, seed=seed + i) for i in (1, 2))
    always, more = make_prefix(q, prefix, kv_heads=kv_heads)
    first = None
    if documents:
        starts = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.2
        first = torch.where(starts, torch.arange(past, past + T), 0).cummax(1).values
    query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)
    begin = torch.zeros(B, T, 1, dtype=torch.int64) if first is None else first[..., None]
    sees = (key >= begin) & (key <= query) & ((key > query - (window or 10**6)) | (key < begin + sinks))
    options = dict(window=window, sinks=sinks, prefix=always, first=first)
    outputs = [causal_attention(q, k, v, backend=backend, **options) for backend in ("masked", "flash")]
    if documents and past == 0:
        outputs.append(causal_attention(q, k, v, backend="flash", bounds=bounds_of(first), **options))
    equal([by_definition(q, k, v, sees, always), *outputs], [q, k, v, *more])


@pytest.mark.parametrize("past", range(3, 20))
def test_one_token_of_a_stream_sees_its_sinks(past):
    """This holds also when there are more keys than window and sinks, as in the state of a wider window."""
    q, (k, v) = rand(B, 1, H, D), (rand(B, past + 1, H, D, seed=i) for i in (1, 2))
    two = torch.cat([rand(B, 1, H, D, seed=3), q], 1)
    more = causal_attention(two, k, v, window=4, sinks=2, backend="masked")[:, 1:]
    torch.testing.assert_close(causal_attention(q, k, v, window=4, sinks=2, backend="masked"), more)


@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 36), stride=st.integers(1, 5), prefix=st.integers(0, 3),
       kv_heads=st.sampled_from([1, H]), seed=st.integers(0, 10**6))  # fmt: skip
def test_segment(T, stride, prefix, kv_heads, seed):
    """Token i sees memory tokens 0 .. i // stride, never a memory token read with a later token's query."""
    groups = -(-T // stride)
    q, k, v = (rand(B, T, heads, D, seed=seed + i) for i, heads in enumerate((H, kv_heads, kv_heads)))
    m_k, m_v = (rand(B, groups, kv_heads, D, seed=seed + 3 + i) for i in range(2))
    always, more = make_prefix(q, prefix, kv_heads=kv_heads)
    token, memory = torch.arange(T), torch.arange(groups)
    sees = torch.cat([memory <= token[:, None] // stride, token <= token[:, None]], 1).expand(B, -1, -1)
    outputs = [segment_attention(q, k, v, m_k, m_v, stride, prefix=always, backend=b) for b in ("masked", "flash")]
    equal([by_definition(q, torch.cat([m_k, k], 1), torch.cat([m_v, v], 1), sees, always), *outputs],
          [q, k, v, m_k, m_v, *more])  # fmt: skip


def test_an_unknown_backend():
    q = rand(B, 3, H, D)
    with pytest.raises(ValueError, match="backend 'fast' is none of auto, flash, masked"):
        causal_attention(q, q, q, backend="fast")


# ---- on a GPU: FlashAttention's own kernels against fp64 on the same numbers


def close(outputs, leaves, oracle, oracle_leaves):
    """Compare bf16 with fp64: within 1 % of the largest entry for outputs, 2 % for gradients. A gradient that is
    exactly 0 (of a token that sees only itself) may have fp32's rounding errors."""
    gen = torch.Generator().manual_seed(9)
    up = torch.randn(oracle.shape, generator=gen, dtype=torch.float64).to(oracle.device)
    want = torch.autograd.grad(oracle, oracle_leaves, up)
    got = torch.autograd.grad(outputs, leaves, up.to(outputs.dtype))
    assert (outputs.double() - oracle).abs().max() < 1e-2 * oracle.abs().max()
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).abs().max() < max(2e-2 * w.abs().max(), 1e-4)


def halved(*tensors):
    """The same numbers as leaves in bf16 and as leaves in fp64."""
    half = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in tensors]
    return half, [t.detach().double().requires_grad_() for t in half]


@pytest.mark.gpu
@pytest.mark.parametrize("T, past", [(1, 0), (130, 0), (1000, 0), (100, 300)])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("prefix", [0, 16])
@pytest.mark.parametrize("kv_heads", [1, H])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("documents", [False, True, "bounds"])
def test_causal_on_a_gpu(T, past, window, prefix, kv_heads, sinks, documents):
    shapes = [(B, T, H, D)] + 2 * [(B, past + T, kv_heads, D)]
    shapes += [(B, T, H, D), *2 * [(B, prefix, kv_heads, D)]] if prefix else []
    half, exact = halved(*(rand(*shape, seed=i) for i, shape in enumerate(shapes)))
    first = None
    if documents:
        starts = torch.rand(B, T, generator=torch.Generator().manual_seed(T)) < 0.02
        first = torch.where(starts, torch.arange(past, past + T), 0).cummax(1).values.cuda()
    outputs = []
    for leaves, backend in ((half, "auto"), (exact, "masked")):
        q, k, v, *rest = leaves
        always = Prefix(*rest) if prefix else None
        bounds = bounds_of(first) if documents == "bounds" and past == 0 else None
        outputs.append(
            causal_attention(
                q, k, v, window=window, sinks=sinks, prefix=always, first=first, bounds=bounds, backend=backend
            )
        )
    close(outputs[0], half, outputs[1], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("T, stride", [(512, 2), (512, 1), (130, 2), (129, 2), (41, 4)])
@pytest.mark.parametrize("prefix", [0, 16])
def test_segment_on_a_gpu(T, stride, prefix):
    groups = -(-T // stride)
    shapes = 3 * [(B, T, H, D)] + 2 * [(B, groups, H, D)] + ([(B, T, H, D), *2 * [(B, prefix, H, D)]] if prefix else [])
    half, exact = halved(*(rand(*shape, seed=i) for i, shape in enumerate(shapes)))
    outputs = []
    for leaves, backend in ((half, "auto"), (exact, "masked")):
        always = Prefix(*leaves[5:]) if prefix else None
        outputs.append(segment_attention(*leaves[:5], stride, prefix=always, backend=backend))
    close(outputs[0], half, outputs[1], exact)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_a_stream_in_c(monkeypatch, dtype, heads, prefix):
    if reason := native.unserved(token.SOURCE, torch.zeros(1)):
        pytest.skip(f"no C: {reason}")
    gen = torch.Generator().manual_seed(0)

    def draw(n, heads=3):
        return 3 * torch.randn(2, n, heads, 10, generator=gen, dtype=dtype)

    q, k, v = draw(1, heads), draw(41)[:, 4:], draw(37)
    before = Prefix(draw(1, heads), draw(5)[:1].expand(2, -1, -1, -1), draw(5)) if prefix else None
    expected = masked_attention(q.requires_grad_(), k, v, None, before)  # PyTorch computes it when gradients are needed
    with torch.no_grad():
        assert token.serves(q)
        found = masked_attention(q, k, v, None, before)
        monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
        assert torch.equal(masked_attention(q, k, v, None, before), found)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5  # for scores up to 100
    torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)
