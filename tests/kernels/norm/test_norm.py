"""RMSNorm: C agrees with PyTorch, forward and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.packed import Packed
from titans_pt.kernels import native
from titans_pt.kernels.norm import dispatch, rms_norm


@pytest.mark.parametrize("shape", [(3, 5, 33), (1, 1, 8), (2, 150, 4, 6), (7, 64)])
def test_it_is_the_norm(shape):
    if reason := native.unserved(dispatch.SOURCE, torch.zeros(1)):
        pytest.skip(f"no C: {reason}")
    gen = torch.Generator().manual_seed(0)
    x, weight, outer = (torch.randn(s, generator=gen, dtype=torch.float64) for s in (shape, shape[-1:], shape))
    x, weight, results = x.requires_grad_(), weight.requires_grad_(), []
    for y in (rms_norm(x, weight, 1e-3), F.rms_norm(x, weight.shape, weight, 1e-3)):
        results.append([y, *torch.autograd.grad((y * outer).sum(), (x, weight))])
    assert results[0][0].grad_fn.name().startswith("_Norm")
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
    x, weight, results, threads = torch.randn(300, 24, requires_grad=True), torch.randn(24, requires_grad=True), [], 1
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y = rms_norm(x, weight, 1e-6)
            results.append([y, *torch.autograd.grad(y.square().sum(), (x, weight))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_other_dtypes_are_pytorchs():
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))


def test_a_weight_on_another_device_is_no_address():
    x, weight = torch.randn(2, 8), torch.ones(8, device="meta")
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        assert not rms_norm(x, weight, 1e-6).is_meta


def test_a_weight_without_memory_of_its_own():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, Packed(weight), 1e-3), rms_norm(x, weight, 1e-3))
