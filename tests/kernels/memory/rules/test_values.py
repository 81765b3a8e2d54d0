"""Results of rules for numbers worked out by hand: the naive and the chunked form share these functions."""

import math

import pytest
import torch

from titans_pt.kernels.memory.rules import RULES
from titans_pt.kernels.memory.rules.muon import STEPS, orthogonal, unit


def rule(name: str, **settings):
    found = RULES.find(name)
    return found(found.Settings(**settings))


def numbers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_moneta_meets_the_gradient_of_half_the_squared_norm():
    # q = 4 of (2, -1): mean |A|^4 = 17/2, hence M = (8, -1) / sqrt(8.5).
    found = rule("moneta", p=3, q=4).met(numbers([2.0, -1.0]))
    torch.testing.assert_close(found, numbers([8.0, -1.0]) / math.sqrt(8.5), rtol=1e-5, atol=0)
    assert torch.allclose(rule("moneta", p=3, q=2).met(numbers([2.0, -1.0])), numbers([2.0, -1.0]))
    assert rule("moneta", p=3, q=4).loss(numbers(2.0, -1.0), numbers(0.0, 0.0), ()) == 9.0


def test_memora_meets_a_distribution_over_the_inputs_of_each_output():
    logits = numbers([0.0, 0.0], [math.log(3), 0.0])  # two inputs, two outputs
    torch.testing.assert_close(rule("memora").met(logits), 2 * numbers([0.25, 0.5], [0.75, 0.5]))
    torch.testing.assert_close(rule("memora", scale=1.0).met(logits).sum(0), numbers(1.0, 1.0))


def test_dot_adds_the_value_and_corrects_nothing():
    v, error = numbers(1.0, 2.0), numbers(0.5, 7.0)
    assert rule("dot").loss(error, v, ()) == -2 * (1.5 * 1 + 9 * 2)
    assert torch.equal(rule("dot").gradient(error, v, ()), -2 * v)


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_newton_and_schulz_bring_singular_values_near_one(shape):
    assert STEPS == 5
    momentum = 50 * torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, v = torch.linalg.svd(momentum, full_matrices=False)
    found = u.mT @ orthogonal(momentum) @ v.mT
    large = s > 0.1 * s.max()  # five steps do not reach the smallest ones
    assert large.sum() > 2 and (found.diagonal()[large] - 1).abs().max() < 0.35, "singular values"
    assert (found - torch.diag(found.diagonal())).abs().max() < 1e-9, "the same singular vectors"


def test_a_unit_step_is_as_long_as_an_orthogonal_one():
    found = unit(numbers([300.0, 0.0, 0.0], [0.0, 400.0, 0.0]))  # norm 500, scaled to norm sqrt(2)
    torch.testing.assert_close(found, math.sqrt(2) * numbers([0.6, 0.0, 0.0], [0.0, 0.8, 0.0]), rtol=1e-3, atol=0)


def test_lact_keeps_the_length_of_each_output_s_weights():
    weights, momentum = numbers([3.0, 0.0], [4.0, 2.0]), numbers([7.0, -1.0], [2.0, 5.0])
    found = rule("lact", size=0.5).closed(weights, momentum, (numbers(0.8),))
    moved = weights + 0.5 * 0.8 * 2 * math.sqrt(2) * orthogonal(momentum)
    torch.testing.assert_close(found.norm(dim=0), numbers(5.0, 2.0))
    torch.testing.assert_close(found / found.norm(dim=0), moved / moved.norm(dim=0))


def test_features_of_the_second_degree_are_a_kernel():
    x, y = numbers(0.3, -0.2, 0.9), numbers(1.1, 0.4, -0.5)
    omega = rule("omega", degree=2)
    inner = x @ y
    torch.testing.assert_close(omega.features(x) @ omega.features(y), (inner + inner**2 / 2) / 1.5)
    assert omega.features(x).shape == (omega.width(3),) == (9,)


def test_the_window_takes_less_of_theta_where_its_shares_are_more_than_one():
    own = tuple(numbers(share) for share in (1.0, 0.5, 0.5))
    omega = rule("omega", window=3)
    assert omega.share(numbers(0.0), own) == 0.5
    assert torch.equal(omega.shares(own), numbers(1.0, 0.5, 0.5))
