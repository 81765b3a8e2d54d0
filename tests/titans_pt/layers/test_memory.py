"""Guarantees of the memory layer's parts: bounded gates, unit keys, the start of M_0."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.mixers import small_config
from titans_pt.config import MemoryConfig
from titans_pt.config.files import load_config
from titans_pt.kernels.memory import neural_memory
from titans_pt.layers.memory import NeuralMemory, Projection, network_shape
from titans_pt.layers.memory_gates import MemoryGates, _hard, default_step_bound
from titans_pt.models import build_model


def gates_of(d_model, heads, config):
    return MemoryGates(d_model, heads, config, network_shape(d_model // heads, config).channels)


def short(x, heads=2):
    """Zero values for x: no memory reduces its steps for them."""
    return torch.zeros(*x.shape[:2], heads, 4)


@pytest.mark.parametrize("chunk_size, depth", [(1, 2), (16, 2), (64, 2), (2048, 2), (16, 1), (16, 4), (64, 3)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_step_is_bounded_whatever_the_gates_see(chunk_size, depth, scale):
    torch.manual_seed(0)
    config = MemoryConfig(chunk_size=chunk_size, depth=depth)
    gates = gates_of(8, 2, config)
    x = scale * torch.randn(3, 50, 8)
    theta, eta, alpha = gates(x, short(x))
    bound = default_step_bound(config)
    assert theta.shape == eta.shape == alpha.shape == (3, 50, 2) and theta.dtype == torch.float32
    assert (theta <= bound * (1 - eta)).all() and bound * chunk_size < 2
    for gate in (theta, eta, alpha):
        assert ((gate >= 0) & (gate <= 1)).all()


@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_without_a_norm_equal_keys_written_with_the_largest_step_do_not_diverge(chunk_size):
    """A linear memory writes the same pair in all chunks: its error falls from chunk to chunk."""
    config = MemoryConfig(chunk_size=chunk_size, depth=1, norm=False, residual=False)
    bound, chunks, width = default_step_bound(config), 30, 8
    k = F.normalize(torch.randn(1, 1, 1, width, dtype=torch.float64), dim=-1).expand(1, chunks * chunk_size, 1, width)
    v = torch.ones_like(k)
    theta, zero = k.new_full(k.shape[:3], bound), k.new_zeros(k.shape[:3])
    start = (torch.zeros(1, width, width, dtype=torch.float64),)
    _, end = neural_memory(k, k, v, theta, zero, zero, start, network=network_shape(width, config), norm=None,
                           chunk_size=chunk_size, output_final_state=True)  # fmt: skip
    error = k[0, 0, 0] @ end.weights[0][0, 0] - 1
    assert error.tolist() == pytest.approx(width * [-((1 - 2 * chunk_size * bound) ** chunks)])
    assert error.abs().max() < 0.1


def growth(config: MemoryConfig, long: float = 1.0) -> float:
    """Growth of a small change of M_0 over 512 tokens, each written with the largest step. Few words make up most of
    the text. Above 1, outer gradients grow with the text's length.

    long: factor on the values' length.
    """
    torch.manual_seed(0)
    rows, length, heads, width, words = 2, 512, 4, 32, 200
    d_model = heads * width
    memory = NeuralMemory(d_model, heads, 4, config, 1e-6).double()
    word = torch.multinomial(1 / torch.arange(1.0, words + 1), rows * length, replacement=True).view(rows, length)
    shape, double = (words, heads, width), {"dtype": torch.float64}
    always = torch.randn(heads, width, **double)  # common part of all words' keys
    k = (torch.randn(shape, **double) + always)[word] + 0.1 * torch.randn(rows, length, heads, width)
    k = F.normalize(k, dim=-1)
    v = long * F.silu(torch.randn(shape, **double)[word] + 0.3 * torch.randn(rows, length, heads, width))
    with torch.no_grad():
        memory.gates.linear.weight.zero_()
        memory.gates.linear.bias.view(heads, -1, 3)[:] = torch.tensor([100.0, 0.0, -100.0])
        theta, eta, alpha = memory.gates(torch.zeros(rows, length, d_model, **double), v)
        weights, norm = memory.network()
        changed = [w + 1e-7 * w.std() * torch.randn_like(w) for w in weights]
        read = [
            neural_memory(
                k, k, v, theta, eta, alpha, tuple(m), network=memory.shape, norm=norm, chunk_size=config.chunk_size,
            )[0]
            for m in (weights, changed)
        ]  # fmt: skip
    distance = (read[1] - read[0]).pow(2).mean((0, 2, 3)).sqrt()
    return float(distance[-64:].mean() / distance[:16].mean())


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_small_change_of_the_start_does_not_grow(depth, chunk_size):
    assert growth(MemoryConfig(depth=depth, chunk_size=chunk_size)) < 1.5


@pytest.mark.parametrize("per_layer_gates", [False, True])
@pytest.mark.parametrize("depth", [3, 4])
def test_long_values_make_no_deep_memory_chaotic(depth, per_layer_gates):
    assert growth(MemoryConfig(depth=depth, per_layer_gates=per_layer_gates), long=4.0) < 1.5


@pytest.mark.parametrize("depth", [3, 4])
def test_at_the_steps_of_two_matrices_deep_memories_are_chaotic(depth):
    assert growth(MemoryConfig(depth=depth, deep_steps="full", init_std=0.5), long=2.0) > 30


def test_gates_start_where_they_are_configured():
    config = MemoryConfig(per_layer_gates=True, depth=3, theta_init=0.25, eta_init=0.75, alpha_init=0.01)
    gates = gates_of(8, 2, config)
    gates.own_initialisation()
    x = torch.zeros(1, 1, 8)
    theta, eta, alpha = gates(x, short(x))
    assert theta.shape == (1, 1, 2, 3)
    torch.testing.assert_close(eta, torch.full_like(eta, 0.75))
    torch.testing.assert_close(alpha, torch.full_like(alpha, 0.01))
    torch.testing.assert_close(theta, torch.full_like(theta, gates.bound * 0.25 * 0.25))


@pytest.mark.parametrize("start", [0.001, 0.5, 0.999])
def test_hard_gates_start_where_they_are_configured(start):
    """Gates start inside their range, so that none is dead at the start."""
    config = MemoryConfig(gates="hard", theta_init=start, eta_init=0.5, alpha_init=start)
    gates = gates_of(8, 2, config)
    gates.own_initialisation()
    x = torch.zeros(1, 1, 8)
    theta, eta, alpha = gates(x, short(x))
    torch.testing.assert_close(eta, torch.full_like(eta, 0.5))
    torch.testing.assert_close(alpha, torch.full_like(alpha, start), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(theta, torch.full_like(theta, gates.bound * 0.5 * start), rtol=1e-4, atol=1e-6)
    alpha.sum().backward()
    assert (gates.linear.bias.grad.view(2, 1, 3)[..., 2] > 0.04).all()


@pytest.mark.parametrize("gates", ["hard", "sigmoid"])
def test_a_free_step_starts_as_the_bounded_one_and_knows_no_bound(gates):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    found = {}
    for form in ("bounded", "free"):
        layer = gates_of(8, 2, MemoryConfig(theta=form, gates=gates, theta_init=0.25, eta_init=0.75))
        layer.own_initialisation()
        found[form] = layer(0 * x, short(x))
    for bounded, free in zip(found["bounded"], found["free"], strict=True):
        torch.testing.assert_close(bounded, free, rtol=1e-4, atol=1e-6)
    torch.nn.init.constant_(layer.linear.weight, 1e3)
    torch.nn.init.zeros_(layer.linear.bias)
    theta = layer(x, short(x))[0]
    assert theta.isfinite().all() and (theta >= 0).all() and (theta > 1).any()


def test_hard_gates_reach_zero_and_one():
    """Theta and alpha reach both ends of their range. Momentum stays below 1: at 1, a surprise is added for ever."""
    gates = gates_of(1, 1, MemoryConfig(gates="hard"))
    torch.nn.init.ones_(gates.linear.weight)
    torch.nn.init.zeros_(gates.linear.bias)
    x = torch.tensor([[[-9.0], [-4.0], [0.0], [4.0], [9.0]]])
    theta, eta, alpha = (g.flatten().tolist() for g in gates(x, short(x, 1)))
    assert alpha == [0, 0, 0.5, 1, 1]
    assert theta[:2] == [0, 0] and theta[2] > 0
    assert theta[3] == pytest.approx(gates.bound * (1 - eta[3])) and eta[0] > 0 and eta[4] < 1


def test_alpha_starts_the_same_at_all_tokens():
    gates = gates_of(8, 2, MemoryConfig(gates="hard", alpha_init=0.02))
    gates.own_initialisation()
    x = 9 * torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(0))
    alpha = gates(x, short(x))[2]
    torch.testing.assert_close(alpha, torch.full_like(alpha, 0.02))


@pytest.mark.parametrize("dead, alive", [(-7.0, 1.0), (7.0, 0.0)])
def test_a_dead_gate_comes_back(dead, alive):
    """The gate is far beyond the cut, where a clamp's gradient is 0."""
    gates = gates_of(8, 2, MemoryConfig(gates="hard"))
    gates.own_initialisation()
    with torch.no_grad():
        gates.linear.bias.view(2, 1, 3)[..., 2] = dead
    x = torch.ones(1, 2, 8)
    assert (gates(x, short(x))[2] == 1 - alive).all()
    optimizer = torch.optim.AdamW(gates.parameters(), lr=0.05)
    for _ in range(60):
        loss = (gates(x, short(x))[2] - alive).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (gates(x, short(x))[2] - alive).abs().max() < 0.1


def test_the_gradient_of_a_hard_gate_does_not_see_the_cut():
    z = torch.tensor([-4.0, 4.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    share = torch.sigmoid(z.detach())
    for weight in (1.0, -1.0):
        (found,) = torch.autograd.grad(_hard(torch.sigmoid(z)).sum() * weight, z)
        torch.testing.assert_close(found, weight * 1.1 * share * (1 - share))


def test_hard_gates_compile_whole():
    gates = gates_of(8, 2, MemoryConfig(gates="hard"))
    x = 9 * torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0))

    def grads(call):
        return torch.autograd.grad(sum((n + 1) * g.sum() for n, g in enumerate(call(x, short(x)))), gates.parameters())

    for a, b in zip(grads(torch.compile(gates, fullgraph=True, backend="aot_eager")), grads(gates), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gates", ["hard", "sigmoid"])
def test_every_channel_forgets_by_itself(gates):
    config = MemoryConfig(alpha="channel", gates=gates, per_layer_gates=True, depth=3, expansion=2, alpha_init=0.01)
    layer = gates_of(8, 2, config)
    layer.own_initialisation()
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    theta, eta, alpha = layer(0 * x, short(x))
    assert theta.shape == eta.shape == (1, 5, 2, 3) and alpha.shape == (1, 5, 2, 4 + 8 + 8)
    torch.testing.assert_close(alpha, torch.full_like(alpha, 0.01), rtol=1e-4, atol=1e-6)
    if gates == "hard":  # equal at all tokens, yet not dead: alpha's own weights get gradients
        torch.testing.assert_close(layer(x, short(x))[2], alpha)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        (layer(x, short(x))[2] * torch.arange(20)).sum().backward()
        optimizer.step()
    alpha = layer(x, short(x))[2]
    assert alpha.std(dim=1).max() > 0 and alpha.std(dim=-1).min() > 0 and layer.alpha_in.weight.grad.abs().min() > 0


def test_a_gate_that_is_off_is_zero():
    gates = gates_of(8, 2, MemoryConfig(momentum=False, forgetting=False))
    x = torch.randn(1, 5, 8)
    theta, eta, alpha = gates(x, short(x))
    assert (eta == 0).all() and (alpha == 0).all() and (theta > 0).all()


def test_keys_have_unit_length_and_values_do_not():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8)
    keys, _ = Projection(8, 2, 4, unit=True)(x)
    values, _ = Projection(8, 2, 4, unit=False)(x)
    assert keys.shape == values.shape == (2, 9, 2, 4)
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(2, 9, 2))
    assert values.norm(dim=-1).std() > 0


HIERARCHY = {"memory": {"hierarchy": {"chunk": 4, "shard": 8, "locals": [2]}}}


@pytest.mark.parametrize(
    "mixer, changes",
    [(name, {}) for name in ("lmm", "mac", "mag", "mal")] + [("lmm", HIERARCHY), ("lmm", {"conv_width": 1})],
)
def test_values_begin_as_those_of_their_own_token_alone(mixer, changes):
    config = small_config([mixer], **changes)
    x = torch.randn(2, 9, config.d_model, generator=torch.Generator().manual_seed(0))
    for block in build_model(config).blocks:
        memory = block.mixer.memory
        values, _ = memory.v(x)
        torch.testing.assert_close(values.flatten(-2), F.silu(memory.v.linear(x)))
        keys, _ = memory.k(x)
        mixed = not torch.allclose(keys[:, 1:], memory.k(x[:, 1:])[0])
        assert mixed == (config.conv_width > 1)


def test_a_prefix_is_written_to_the_memory_that_others_begin_with():
    torch.manual_seed(0)
    memory = NeuralMemory(8, 2, 1, MemoryConfig(chunk_size=4, expansion=2, forget_to="zero"), 1e-5)
    prefix, x = torch.randn(1, 8, 8), torch.randn(2, 5, 8)
    _, start = memory.start_after(prefix)
    fresh, _ = memory(x)
    after, _ = memory(x, start=start)
    assert not torch.allclose(fresh, after)
    # Without convolutions and momentum, and with forgetting to zero, a prefix equals preceding tokens.
    memory.config = memory.config.model_copy(update={"momentum": False})
    memory.gates.config = memory.config
    _, start = memory.start_after(prefix)
    whole, _ = memory(torch.cat([prefix.expand(2, -1, -1), x], 1))
    torch.testing.assert_close(memory(x, start=start)[0], whole[:, 8:])


@pytest.mark.parametrize("rule", ["muon", "lact", "atlas", "moneta"])
@pytest.mark.parametrize("tokens", [2, 4, 6])
def test_a_rule_that_writes_at_chunk_ends_takes_the_whole_prefix(rule, tokens):
    config = load_config("quickstart", ["model.memory.chunk_size=4", f"model.memory.rule={rule}"]).model.memory
    layer = NeuralMemory(16, 2, 4, config, 1e-5).double()
    prefix = torch.randn(1, tokens, 16, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(sum(w.square().sum() for w in layer.start_after(prefix)[1]), prefix)
    each = gradient[0].norm(dim=-1)
    assert each.min() > 1e-3 * each.max()


def test_forgetting_leads_to_the_start_after_the_prefix():
    """This holds also in later calls of the stream, which do not get the start again. It is not the learned M_0."""
    torch.manual_seed(0)
    config = MemoryConfig(chunk_size=4, expansion=2, forget_to="start", writes=False)
    memory = NeuralMemory(8, 2, 3, config, 1e-5)
    start = tuple(w + torch.randn_like(w) for w in memory.network()[0])
    memory.gates.writes = True
    memory.gates.own_initialisation()
    with torch.no_grad():
        memory.gates.linear.weight.zero_()
        bias = memory.gates.linear.bias.view(2, 1, 3)
        bias[..., 0], bias[..., 2] = -80, 0  # write nothing, forget half
    x = torch.randn(2, 9, 8)
    _, state = memory(x[:, :4], start=start)
    state.memory.weights = tuple(w + 1 for w in state.memory.weights)
    for piece in (x[:, 4:6], x[:, 6:]):
        _, state = memory(piece, state)
    for w, w0 in zip(state.memory.weights, start, strict=True):
        torch.testing.assert_close(w, (w0 + 0.5**5).expand_as(w))


def test_a_state_keeps_no_start_that_nobody_needs():
    torch.manual_seed(0)
    prefix, x = torch.randn(1, 8, 8), torch.randn(2, 5, 8)
    zero = NeuralMemory(8, 2, 1, MemoryConfig(chunk_size=4, expansion=2, forget_to="zero"), 1e-5)
    assert zero(x, start=zero.start_after(prefix)[1])[1].start is None
    plain = NeuralMemory(8, 2, 1, MemoryConfig(chunk_size=4, expansion=2, forget_to="start"), 1e-5)
    assert plain(x)[1].start is None
