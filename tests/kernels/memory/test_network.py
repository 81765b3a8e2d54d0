"""The network's shape as a value: the shapes of its matrices, and calls that contradict it."""

import pytest
import torch

from titans_pt.kernels.memory import MemoryState, NetworkShape, neural_memory


def test_layers_chain_from_width_to_width():
    assert NetworkShape(8, 32, depth=3).layers == ((8, 32), (32, 32), (32, 8))
    assert NetworkShape(8, 32, depth=1).layers == ((8, 8),)


@pytest.mark.parametrize("network, message", [
    (NetworkShape(4, 6), "are those of"),
    (NetworkShape(4, 5, norm=True), "are those of"),
    (NetworkShape(4, 5, norm=False, activation="tanh"), "activation 'tanh' is none of gelu, silu, relu"),
])  # fmt: skip
def test_a_call_that_contradicts_its_network(network, message):
    q, gate = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    weights = torch.zeros(2, 4, 5), torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match=message):
        neural_memory(q, q, q, gate, gate, gate, weights, network=network)


def test_no_weights():
    q, gate = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match="at least one weight matrix"):
        neural_memory(q, q, q, gate, gate, gate, ())


def test_a_state_of_other_rows():
    q, gate = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    weights = torch.zeros(2, 4, 5), torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match="initial_state has 2 rows, q has 1"):
        neural_memory(q, q, q, gate, gate, gate, weights, initial_state=MemoryState.initial(weights, 2))
    with pytest.raises(ValueError, match=r"without zeros, got \[\(0, 3, 2, 4\)"):
        neural_memory(q[:0], q[:0], q[:0], gate[:0], gate[:0], gate[:0], weights)
