"""Delta gradient descent by its definition: the minimum of a sum of squares, and the delta rule as a special case."""

import pytest
import torch

from tests.kernels.memory.test_reductions import D, H, inputs, outer, predicted, recurrence, same  # noqa: F401
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.kernels.memory import NetworkShape, neural_memory
from titans_pt.kernels.memory.rules import RULES, Rule
from titans_pt.kernels.memory.rules.dgd import Dgd
from titans_pt.kernels.memory.rules.dot import Dot

MATRIX = NetworkShape(D, D, depth=1, norm=False, residual=False)


def test_a_step_is_the_least_of_its_squares():
    """For a long input x, a step minimises theta ||W^T x + g||^2 + ||W - (1 - alpha) W_0||^2: its slope is zero."""
    gen = torch.Generator().manual_seed(0)
    x, v = (3 * torch.randn(D, generator=gen, dtype=torch.float64) for _ in range(2))
    start = torch.randn(D, D, generator=gen, dtype=torch.float64)
    theta, alpha = 0.4, 0.3
    g = 2 * (x @ start - v)
    slope = torch.eye(D, dtype=torch.float64) + theta * torch.outer(x, x)
    want = torch.linalg.solve(slope, (1 - alpha) * start - theta * torch.outer(x, g))
    gate = torch.ones(1, 1, 1, dtype=torch.float64)
    for backend in ("naive", "chunked"):
        _, state = neural_memory(
            *(y.view(1, 1, 1, D) for y in (x, x, v)), theta * gate, 0 * gate, alpha * gate, (start[None],),
            network=MATRIX, rule=RULES.find("dgd")(), output_final_state=True, backend=backend,
        )  # fmt: skip
        same(state.weights[0][0, 0], want)


class Hebbian(Dgd):
    """The dot product as the loss."""

    name = "hebbian_dgd"
    loss, gradient, gradient_backward = Dot.loss, Dot.gradient, Dot.gradient_backward


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_with_the_dot_product_it_is_the_gated_delta_rule(inputs, chunk_size):  # noqa: F811
    """g = -2 v for each token, independent of the weights: chunks of any length give Gated DeltaNet."""
    q, k, v, beta, decay = inputs
    beta = 0.9 * beta
    want = recurrence(lambda S, k, v, b, a: a * S + b * outer(k, 2 * v - predicted(a * S, k)), q, k, v, beta, decay)
    zero, theta = torch.zeros(H, D, D, dtype=torch.float64), beta / (1 - beta)  # theta' = beta: keys have length 1
    found, _ = neural_memory(q, k, v, theta, 0 * beta, 1 - decay, (zero,), network=MATRIX, chunk_size=chunk_size,
                             rule=Hebbian())  # fmt: skip
    same(found, want)


def test_no_write_overshoots_whatever_the_step():
    rule, x = Dgd(), 20 * torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step, erased = rule.steps(torch.full((7, 1), 1e6, dtype=torch.float64), x)
    assert torch.equal(step, erased) and (erased * x.square().sum(-1, keepdim=True) < 1).all()


def test_it_has_one_alpha_a_matrix(tiny):
    with pytest.raises(UserError, match="model.memory.alpha: given 'channel'; must be head with model.memory.rule=dgd"):
        load_config(tiny(), ["model.mixers=[lmm]", "model.memory.rule=dgd", "model.memory.alpha=channel"])
    assert not Rule().erases and Dgd().erases and not Dgd().plain
