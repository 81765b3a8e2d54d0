"""The short convolution: in C as in PyTorch, forward and every gradient, in pieces as in one call."""

import pytest
import torch
import torch.nn.functional as F

from titans_pt.kernels import native
from titans_pt.kernels.convolution import dispatch, short_convolution


def plain(x, past, weight, bias):
    padded = torch.cat([past, x], 1).transpose(1, 2)
    return F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[2]).transpose(1, 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("B", "T", "channels", "width"), [(2, 9, 33, 4), (1, 1, 16, 4), (3, 2, 7, 5), (2, 20, 64, 2)])
def test_it_is_the_convolution(B, T, channels, width, bias):
    if reason := native.unserved(dispatch.SOURCE, torch.zeros(1)):
        pytest.skip(f"no C: {reason}")
    gen = torch.Generator().manual_seed(T)
    shapes = [(B, T, channels), (B, width - 1, channels), (channels, width), (channels,)]
    leaves = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]
    if not bias:
        leaves[3] = None
    weight = torch.randn(B, T, channels, generator=gen, dtype=torch.float64)
    asked = [leaf for leaf in leaves if leaf is not None]
    results = []
    for function in (short_convolution, plain):
        y = function(*leaves)
        results.append([y, *torch.autograd.grad((y * weight).sum(), asked)])
    assert results[0][0].grad_fn.name().startswith("_Convolution")
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
    x, past, weight = torch.randn(2, 5, 40), torch.randn(2, 3, 40), torch.randn(40, 4)
    one, threads = short_convolution(x, past, weight), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(short_convolution(x, past, weight), one)
    finally:
        torch.set_num_threads(threads)
