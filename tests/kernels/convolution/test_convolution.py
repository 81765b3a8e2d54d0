"""The short convolution: C agrees with PyTorch, forward and every gradient; pieces agree with one call."""

import ctypes

import pytest
import torch

from tests.helpers.packed import Packed
from titans_pt.kernels import native
from titans_pt.kernels.convolution import dispatch, short_convolution


def plain(x, past, weight, bias, reach, silu, unit):
    """Compute the convolution token by token."""
    padded, width, outputs = torch.cat([past, x], 1), weight.shape[1], []
    for t in range(x.shape[1]):
        taps = [padded[:, t + i] * weight[:, i] for i in range(width)]
        if reach is not None:
            taps = [torch.where((reach[:, t] >= width - 1 - i)[:, None], tap, 0.0) for i, tap in enumerate(taps)]
        outputs.append(sum(taps) if bias is None else sum(taps) + bias)
    y = torch.stack(outputs, 1)
    y = y * torch.sigmoid(y) if silu else y
    if not unit:
        return y
    heads = y.unflatten(-1, (-1, unit))
    return (heads / heads.norm(dim=-1, keepdim=True).clamp_min(dispatch.SMALLEST)).flatten(-2)


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "channels", "width", "bias", "silu", "unit"),
    [
        (2, 9, 33, 4, True, False, 0), (1, 1, 16, 4, False, False, 0), (3, 2, 7, 5, True, True, 0),
        (2, 20, 64, 2, False, True, 0), (2, 9, 36, 4, False, True, 12), (1, 1, 32, 4, False, True, 16),
        (2, 6, 10, 4, False, False, 5),
    ],
)  # fmt: skip
def test_it_is_the_convolution(monkeypatch, B, T, channels, width, bias, silu, unit, documents, in_c):
    if in_c and (reason := native.unserved(dispatch.SOURCE, torch.zeros(1))):
        pytest.skip(f"no C: {reason}")
    if not in_c:
        monkeypatch.setattr(native, "unserved", lambda *_: "not here")
    gen = torch.Generator().manual_seed(T)
    shapes = [(B, T, channels), (B, width - 1, channels), (channels, width), (channels,)]
    leaves = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]
    if not bias:
        leaves[3] = None
    weight = torch.randn(B, T, channels, generator=gen, dtype=torch.float64)
    reach = torch.randint(0, width, (B, T), generator=gen) if documents else None
    asked = [leaf for leaf in leaves if leaf is not None]
    results = []
    for function in (short_convolution, plain):
        y = function(*leaves, reach=reach, silu=silu, unit=unit)
        results.append([y, *torch.autograd.grad((y * weight).sum(), asked)])
    assert results[0][0].grad_fn.name().startswith("_Convolution") == in_c
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_heads_of_no_length_stay_none():
    x = torch.zeros(1, 4, 8, requires_grad=True)
    y = short_convolution(x, torch.zeros(1, 3, 8), torch.randn(8, 4), silu=True, unit=4)
    assert torch.equal(y, torch.zeros(1, 4, 8))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
    x, past, weight = torch.randn(2, 5, 40), torch.randn(2, 3, 40), torch.randn(40, 4)
    one, threads = short_convolution(x, past, weight), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(short_convolution(x, past, weight), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("dtype", "groups"), [(torch.float32, [16, 16, 8]), (torch.float64, [8, 8, 8, 8, 8])])
def test_threads_share_the_channels(monkeypatch, dtype, groups):
    """Each group has channels, however wide the machine's vectors are: groups without any would leave threads idle."""
    if reason := native.unserved(dispatch.SOURCE, torch.zeros(1, dtype=dtype)):
        pytest.skip(f"no C: {reason}")
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    x, past, weight = (torch.ones(shape, dtype=dtype) for shape in ((1, 1, 40), (1, 0, 40), (40, 1)))

    def channels_of(group: int) -> int:
        """Number of channels that a call computes which runs only this group."""

        def run(function, count, _operations, *arguments):
            assert count == len(groups)
            function(*arguments, ctypes.c_int64(group), ctypes.c_int64(group + 1))

        monkeypatch.setattr(native, "run", run)
        with torch.no_grad():
            return int(short_convolution(x, past, weight).sum())

    assert [channels_of(group) for group in range(len(groups))] == groups


def test_a_bias_without_memory_of_its_own():
    """C read its address of 0 as no bias."""
    x, past, weight, bias = torch.randn(2, 5, 6), torch.randn(2, 3, 6), torch.randn(6, 4), torch.randn(6)
    with torch.no_grad():
        expected = short_convolution(x, past, weight, bias)
        torch.testing.assert_close(short_convolution(x, past, weight, Packed(bias)), expected)
        torch.testing.assert_close(short_convolution(x, past, Packed(weight), bias), expected)
