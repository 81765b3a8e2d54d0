"""Rotary embedding against multiplication by complex numbers, at small and large positions."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titans_pt.layers.rotary import rotate, rotation, rotation_from

BASE = 10_000.0


def turned(x, position):
    """Rotate by definition in float64: pairs (i, i + D / 2) are complex numbers, times exp(i position frequency)."""
    half = x.shape[-1] // 2
    angle = position.double()[:, None, None] * BASE ** (-torch.arange(half).double() / half)
    y = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([y.real, y.imag], -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("start", [0, 4_000, 10_000_000])
def test_definition(start, dtype, tolerance):
    x = torch.randn(2, 7, 3, 16, generator=torch.Generator().manual_seed(start)).to(dtype)
    position = torch.arange(start, start + 7)
    y = rotate(x, *rotation(position, 16, BASE, dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), turned(x, position), rtol=0, atol=tolerance)


def test_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind()

    def at(x, place):
        return rotate(x, *rotation(torch.tensor([place]), 8, BASE, torch.float64))

    scores = [(at(q, p + 5) * at(k, p)).sum() for p in (0, 1, 9_999_995)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=0, atol=1e-8)


def test_a_call_on_fake_tensors_leaves_none_to_later_calls():
    with FakeTensorMode():
        rotation_from(3, torch.zeros(1, 7, 2, 16), BASE)
    found = rotation_from(3, torch.zeros(1, 7, 2, 16), BASE)
    torch.testing.assert_close(found, rotation(torch.arange(3, 10), 16, BASE, torch.float32))
