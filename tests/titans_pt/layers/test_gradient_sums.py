"""Gradients that are sums over segments or chunks: bf16 layers sum them in fp32."""

import torch
from torch import nn

from titans_pt.config import MemoryConfig
from titans_pt.layers.memory import MemoryNetwork, network_shape
from titans_pt.layers.self_modifying import Readout

USES = 1000
"""A sum of ones in bf16 stays at 256."""


def check(module: nn.Module, used: dict[str, torch.Tensor]):
    """``used``: numbers made from ``module`` by the name of the parameter that each has as a summand USES times."""
    torch.stack([numbers.float().sum() for numbers in used.values()]).sum().backward()
    for name in used:
        gradient = module.get_parameter(name).grad
        assert gradient.dtype == torch.bfloat16 and (gradient == USES).all(), name


def test_the_start_of_a_memory_that_many_segments_read():
    network = MemoryNetwork(2, network_shape(4, MemoryConfig()), MemoryConfig()).bfloat16()
    weights, norm = network()
    names = [name for name, _ in network.named_parameters()]
    check(network, {name: sum([copy] * USES) for name, copy in zip(names, (*weights, *norm), strict=True)})


def test_the_gates_of_hope_that_every_chunk_reads():
    readout = Readout(2, 4, 2, 1).bfloat16()
    names = "step", "step_bias", "keep", "keep_bias"
    check(readout, {name: sum([copy] * USES) for name, copy in zip(names, readout(), strict=True)})
