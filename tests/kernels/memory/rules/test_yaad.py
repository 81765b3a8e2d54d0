"""Yaad: its loss by hand, its gradient by autograd, its memory by the definition, and its robustness to outliers."""

import pytest
import torch

from tests.kernels.memory.calls import assert_same
from tests.kernels.memory.test_rule_contract import given, run
from titans_pt.kernels.memory import NetworkShape, neural_memory
from titans_pt.kernels.memory.rules.yaad import Yaad

FORMS = ("radial", "switch")


def rule(form: str) -> Yaad:
    return Yaad(Yaad.Settings(form=form))


@pytest.mark.parametrize("form, small, large", [
    ("radial", 0.25, 2 * 2 * 5 - 4),  # ||(3, 4, 0, 0)|| = 5, d = 1 sqrt(4)
    ("switch", 0.25, 2 * 7),
])  # fmt: skip
def test_its_loss_by_hand(form, small, large):
    error = torch.tensor([[0.5, 0, 0, 0], [3.0, 4, 0, 0]])
    found = rule(form).loss(error, error, (torch.ones(2, 1),))
    torch.testing.assert_close(found, torch.tensor([small, float(large)]))


@pytest.mark.parametrize("form", FORMS)
def test_its_gradient_is_that_of_its_loss(form):
    gen = torch.Generator().manual_seed(0)
    error = (3 * torch.randn(50, 6, generator=gen, dtype=torch.float64)).requires_grad_()
    own = (0.5 + torch.rand(50, 1, generator=gen, dtype=torch.float64),)
    (expected,) = torch.autograd.grad(rule(form).loss(error, error, own).sum(), error)
    torch.testing.assert_close(rule(form).gradient(error, error, own), expected, rtol=1e-12, atol=1e-12)
    assert rule(form).gradient(torch.zeros(1, 6), error, (torch.ones(1, 1),)).eq(0).all(), "at no error"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [
    {"chunk_size": 5, "forget_to": "start"}, {"chunk_size": 16, "reset": True}, {"chunk_size": 7, "stale": True},
], ids=str)  # fmt: skip
def test_its_memory_equals_the_definition(form, options):
    """Thresholds are as large as the errors, so that errors occur on both sides of them."""
    tensors, own = given(rule(form), 2, seed=1)
    options = dict(options)
    if options.get("reset"):
        options["reset"] = torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.15
    expected, chunkwise = (run(rule(form), tensors, own, 2, backend, **options) for backend in ("naive", "chunked"))
    for a, b in zip(chunkwise, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_an_outlier_moves_it_no_further_than_the_threshold(form):
    """Only the squared loss moves M in proportion to an outlier, a value a hundred times as large as the others."""
    gen = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 8, generator=gen), dim=-1)
    v, gate = torch.randn(1, 1, 1, 8, generator=gen), torch.full((1, 1, 1), 0.1)
    linear = NetworkShape(8, 8, 1, norm=False, residual=False)

    def moved(scale: float, **options) -> float:
        _, state = neural_memory(
            k, k, scale * v, gate, gate, gate, (torch.zeros(1, 8, 8),), network=linear, output_final_state=True,
            **options,
        )  # fmt: skip
        return state.weights[0].norm().item()

    own = (torch.full((1, 1, 1), 0.5),)
    huber = moved(100, rule=rule(form), own=own) / moved(10, rule=rule(form), own=own)
    assert moved(100) / moved(10) == pytest.approx(10) and huber == pytest.approx(1, abs=0.3)
