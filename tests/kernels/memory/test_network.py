"""The network's shape as a value: the shapes of its matrices, and calls that contradict it."""

import pytest
import torch

from titans_pt import move_state
from titans_pt.kernels.memory import MemoryState, NetworkShape, neural_memory
from titans_pt.kernels.memory.soup import Soup


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


ONE = torch.zeros(1, 3, 2, 4)
STATE = MemoryState.initial((torch.zeros(2, 4, 5), torch.zeros(2, 5, 4)), 1)
SOUP = Soup((STATE.weights,), torch.zeros(1, 3, 2, 3))


@pytest.mark.parametrize(("given", "message"), [
    ({"weights": (torch.zeros(2, 4, 5), torch.zeros(2, 6, 4))}, r"weights must chain .* H=2, D=4, got .*\(2, 6, 4\)"),
    ({"norm": (torch.ones(2, 4), torch.zeros(2, 5))}, r"norm must be two \(2, 4\)"),
    ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
    ({"forget_to": "end"}, "forget_to 'end' is none of start, zero"),
    ({"soup": SOUP}, r"soup.shares must be \(1, 3, 2, 2\), got \(1, 3, 2, 3\)"),
    ({"reset": torch.zeros(1, 3)}, r"reset must be bool \(1, 3\)"),
    ({"reset": torch.zeros(1, 4, dtype=torch.bool)}, r"reset must be bool \(1, 3\)"),
    ({"initial_state": move_state(STATE, "meta")}, "initial_state is on meta, q on cpu; titans_pt.move_state moves it"),
    ({"backend": "cuda"}, "backend 'cuda' is none of auto, triton, native, chunked, naive"),
])  # fmt: skip
def test_what_does_not_fit(given, message):
    gate, weights = torch.zeros(1, 3, 2), (torch.zeros(2, 4, 5), torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match=f"neural_memory: {message}"):
        neural_memory(ONE, ONE, ONE, gate, gate, gate, **{"weights": weights} | given)


def test_a_state_of_other_rows():
    q, gate = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    weights = torch.zeros(2, 4, 5), torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match="initial_state has 2 rows, q has 1"):
        neural_memory(q, q, q, gate, gate, gate, weights, initial_state=MemoryState.initial(weights, 2))
    with pytest.raises(ValueError, match=r"without zeros, got \[\(0, 3, 2, 4\)"):
        neural_memory(q[:0], q[:0], q[:0], gate[:0], gate[:0], gate[:0], weights)
