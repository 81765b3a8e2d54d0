"""A gradient of a gradient, as a gradient penalty takes it, is right or refused."""

import re

import pytest
import torch
from torch.nn.utils.stateless import functional_call

from titans_pt.kernels.memory.rules import RULES
from titans_pt.library import layers
from titans_pt.models.mixers import MIXERS, Mixer

ALONE = [name for name in MIXERS.built_in() if MIXERS.find(name).around is Mixer.around
         and MIXERS.find(name).bind is Mixer.bind]  # fmt: skip
"""Mixers that are a layer by themselves."""
REFUSED = re.compile("first derivatives only|derivative for .+ is not implemented")
"""By our kernels, and by PyTorch's attention."""
STEP = 1e-6


def check(layer: torch.nn.Module) -> bool:
    """The derivative of d(out u)/dx w, along a direction of inputs and parameters, against a central
    difference: whether there is one."""
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
    torch.testing.assert_close(value.detach(), penalty(given, graph=False))  # asking for a graph changes no gradient
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


@pytest.mark.parametrize("name", ALONE)
def test_of_a_mixer(name):
    torch.manual_seed(0)
    heads = {"n_heads": 2} if "n_heads" in MIXERS.find(name).shared else {}
    check(layers.mixer(name, 16, **heads))


@pytest.mark.parametrize("rule", RULES.built_in())
@pytest.mark.parametrize("chunk", [4, 16])
def test_of_a_memory(rule, chunk):
    torch.manual_seed(0)
    found = check(layers.NeuralMemory(16, n_heads=2, rule=rule, chunk_size=chunk))
    assert not (found and rule == "titans")
