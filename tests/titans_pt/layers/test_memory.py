"""What the memory layer promises of its parts: bounded gates, unit keys, where M_0 starts."""

import pytest
import torch

from titans_pt.config import MemoryConfig
from titans_pt.layers.memory import MemoryGates, NeuralMemory, Projection, default_step_bound


@pytest.mark.parametrize("chunk_size", [1, 16, 64, 2048])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_step_is_bounded_whatever_the_gates_see(chunk_size, scale):
    torch.manual_seed(0)
    gates = MemoryGates(8, 2, MemoryConfig(chunk_size=chunk_size))
    theta, eta, alpha = gates(scale * torch.randn(3, 50, 8))
    bound = default_step_bound(chunk_size)
    assert theta.shape == eta.shape == alpha.shape == (3, 50, 2) and theta.dtype == torch.float32
    assert (theta <= bound * (1 - eta)).all() and bound * chunk_size < 2
    for gate in (theta, eta, alpha):
        assert ((gate >= 0) & (gate <= 1)).all()


def test_gates_start_where_they_are_configured():
    config = MemoryConfig(per_layer_gates=True, depth=3, theta_init=0.25, eta_init=0.75, alpha_init=0.01)
    gates = MemoryGates(8, 2, config)
    gates.reset_parameters()
    theta, eta, alpha = gates(torch.zeros(1, 1, 8))
    assert theta.shape == (1, 1, 2, 3)
    torch.testing.assert_close(eta, torch.full_like(eta, 0.75))
    torch.testing.assert_close(alpha, torch.full_like(alpha, 0.01))
    torch.testing.assert_close(theta, torch.full_like(theta, gates.bound * 0.25 * 0.25))


def test_a_gate_that_is_off_is_zero():
    gates = MemoryGates(8, 2, MemoryConfig(momentum=False, forgetting=False))
    theta, eta, alpha = gates(torch.randn(1, 5, 8))
    assert (eta == 0).all() and (alpha == 0).all() and (theta > 0).all()


def test_keys_have_unit_length_and_values_do_not():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8)
    keys, _ = Projection(8, 2, 4, unit=True)(x)
    values, _ = Projection(8, 2, 4, unit=False)(x)
    assert keys.shape == values.shape == (2, 9, 2, 4)
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(2, 9, 2))
    assert values.norm(dim=-1).std() > 0


def test_a_prefix_is_written_to_the_memory_that_others_begin_with():
    torch.manual_seed(0)
    memory = NeuralMemory(8, 2, 1, MemoryConfig(chunk_size=4, expansion=2), 1e-5)
    prefix, x = torch.randn(1, 8, 8), torch.randn(2, 5, 8)
    _, start = memory.start_after(prefix)
    fresh, _ = memory(x)
    after, _ = memory(x, start=start)
    assert not torch.allclose(fresh, after)
    # Without convolutions and momentum a prefix is nothing else than tokens that came before.
    memory.config = memory.config.model_copy(update={"momentum": False})
    memory.gates.config = memory.config
    _, start = memory.start_after(prefix)
    whole, _ = memory(torch.cat([prefix.expand(2, -1, -1), x], 1))
    torch.testing.assert_close(memory(x, start=start)[0], whole[:, 8:])
