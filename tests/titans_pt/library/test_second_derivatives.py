"""Derivatives are right or refused: second derivatives (gradient penalties), forward mode, and torch.func."""

import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.nn.utils.stateless import functional_call

from titans_pt.kernels.memory import neural_memory
from titans_pt.kernels.memory.rules import RULES
from titans_pt.library import layers
from titans_pt.models.mixers import MIXERS, Mixer

ALONE = [name for name in MIXERS.built_in() if MIXERS.find(name).around is Mixer.around
         and MIXERS.find(name).bind is Mixer.bind]  # fmt: skip
"""Mixers that can be used as a single layer."""
REFUSED = re.compile("first derivatives only|derivative for .+ is not implemented")
"""Messages with which our kernels and PyTorch's attention refuse second derivatives."""
MEMORIES = {"hope", "lmm", "mab", "mac", "mag", "mal", "memory"}
MEMORIES_AND_ATTENTION = MEMORIES | {"attention", "liza", "swa"}
"""Layers without forward derivatives."""
STEP = 1e-6


def check(layer: torch.nn.Module) -> bool:
    """Compare the derivative of d(out u)/dx w, along a direction of inputs and parameters, with a central difference.

    Returns whether the layer has this derivative.
    """
    layer = layer.double()
    torch.manual_seed(1)
    given = {"": torch.randn(2, 9, 16, dtype=torch.float64)} | {n: p.detach() for n, p in layer.named_parameters()}
    first, second = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    along = {name: torch.randn_like(p) for name, p in given.items()}

    def penalty(values: dict[str, torch.Tensor], graph: bool) -> torch.Tensor:
        values = {name: p if p.requires_grad else p.clone().requires_grad_() for name, p in values.items()}
        parameters = {name: p for name, p in values.items() if name}
        out = functional_call(layer, parameters, (values[""],))[0]
        (gradient,) = torch.autograd.grad((out * first).sum(), values[""], create_graph=graph)
        return (gradient * second).sum()

    leaves = {name: p.clone().requires_grad_() for name, p in given.items()}
    value = penalty(leaves, graph=True)
    torch.testing.assert_close(value.detach(), penalty(given, graph=False))  # create_graph changes no gradient
    try:
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        if not REFUSED.search(str(error)):
            raise
        return False
    slope = sum((g * along[name]).sum() for name, g in zip(leaves, found, strict=True) if g is not None)
    ahead, behind = (penalty({n: p + s * STEP * along[n] for n, p in given.items()}, graph=False) for s in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * STEP), rtol=1e-5, atol=1e-6)
    return True


@pytest.fixture(autouse=True)
def linear_of_torch(monkeypatch):
    """Restore torch's linear: ZeRO 3, in another test of this process, replaces it by a function without second
    derivatives."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


def made(name):
    """A layer of width 16, with two heads if their number is a setting."""
    if name == "memory":
        return layers.NeuralMemory(16, n_heads=2)
    return layers.mixer(name, 16, **({"n_heads": 2} if "n_heads" in (MIXERS.find(name).shared or ()) else {}))


@pytest.mark.parametrize("name", ALONE)
def test_of_a_mixer(name):
    torch.manual_seed(0)
    check(made(name))


@pytest.mark.parametrize("rule", RULES.built_in())
@pytest.mark.parametrize("chunk", [4, 16])
def test_of_a_memory(rule, chunk):
    torch.manual_seed(0)
    found = check(layers.NeuralMemory(16, n_heads=2, rule=rule, chunk_size=chunk))
    assert not (found and rule == "titans")


@pytest.mark.parametrize("tokens", [9, 1])
@pytest.mark.parametrize("name", [*ALONE, "memory"])
@torch.no_grad()
def test_forward(name, tokens):
    """forward_ad works under no_grad, where kernels in C and Triton drop tangents."""
    torch.manual_seed(0)
    layer = made(name).double()
    before, x, along = torch.randn(3, 2, 9, 16, dtype=torch.float64)
    x, along = x[:, :tokens], along[:, :tokens]
    state = layer(before)[1] if tokens == 1 else None
    ahead, behind = (layer(x + s * STEP * along, state)[0] for s in (1, -1))
    with forward_ad.dual_level():
        try:
            found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, along), state)[0]).tangent
        except NotImplementedError as error:
            assert "forward AD" in str(error) or "jvp function" in str(error)
            assert name in MEMORIES_AND_ATTENTION
            return
    torch.testing.assert_close(found, (ahead - behind) / (2 * STEP), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", [*ALONE, "memory"])
def test_torch_func(name):
    """Gradients per row, by vmap over grad, add up to autograd's gradients."""
    torch.manual_seed(0)
    layer = made(name).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,))[0].square().sum()

    given = dict(layer.named_parameters())
    of_rows = vmap(grad(loss), (None, 0))
    if name in MEMORIES:
        with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
            of_rows(given, x[:, None])
        return
    found = of_rows(given, x[:, None])
    expected = torch.autograd.grad(loss(given, x), list(given.values()), materialize_grads=True, allow_unused=True)
    for key, gradient in zip(given, expected, strict=True):
        torch.testing.assert_close(found[key].sum(0), gradient)


def test_forward_by_the_definition():
    torch.manual_seed(0)
    q, k, v, along = torch.randn(4, 1, 5, 2, 4, dtype=torch.float64)
    gates = torch.rand(3, 1, 5, 2, dtype=torch.float64)
    weights = tuple(torch.randn(2, 2, 4, 4, dtype=torch.float64))

    def memory(k):
        return neural_memory(q, k, v, *gates, weights, chunk_size=2, backend="naive")[0]

    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(memory(forward_ad.make_dual(k, along))).tangent
    expected = (memory(k + STEP * along) - memory(k - STEP * along)) / (2 * STEP)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
