"""Hope's self-modifying memory by autograd, and every rule with the self-modifying memory against its definition."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from titans_pt.config import MemoryConfig
from titans_pt.layers import self_modifying
from titans_pt.layers.documents import Documents
from titans_pt.layers.self_modifying import SelfModifyingMemory
from titans_pt.layers.state import tensors

D, H, CHUNK, T = 4, 2, 4, 9


def layer(**memory) -> SelfModifyingMemory:
    torch.manual_seed(0)
    config = MemoryConfig(**{"chunk_size": CHUNK, "expansion": 2, "rule": "dgd", "momentum": False} | memory)
    found = SelfModifyingMemory(D * H, H, 3, config, 1e-5).double()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return found


def inputs(length=T):
    return torch.randn(2, length, D * H, dtype=torch.float64, requires_grad=True)


def projected(projection, x):
    y = projection.linear(x)
    y = F.silu(sum(F.pad(y, (0, 0, lag, 0))[:, : y.shape[1]] * projection.conv.weight[:, 2 - lag] for lag in range(3)))
    y = y.unflatten(-1, (H, D))
    return y / (y.square().sum(-1, keepdim=True)).sqrt()


def definition(layer: SelfModifyingMemory, x: torch.Tensor) -> torch.Tensor:
    """Compute Eq. 86-91 token by token, one row, head and memory after the other; each gradient by autograd."""
    config, bound, rows = layer.config, layer.gates.bound, []
    named = dict(layer.network.named_parameters())

    def answer(question, weights, memory):
        f = F.gelu(question @ weights[0]) @ weights[1]
        if config.norm:
            f = F.layer_norm(f, (D,)) * named["norm_weight"][memory] + named["norm_bias"][memory]
        return question + f

    for row in range(len(x)):
        xs, qs = projected(layer.x, x[row : row + 1])[0], projected(layer.q, x[row : row + 1])[0]
        heads = []
        for h in range(H):
            begin = [[named["weight_0"][5 * h + m], named["weight_1"][5 * h + m]] for m in range(5)]
            now = [list(weights) for weights in begin]
            still = [[torch.zeros_like(w) for w in weights] for weights in begin]
            step, keep = layer.gates.readout.step[h], layer.gates.readout.keep[h]
            outputs = []
            for t in range(x.shape[1]):
                if t % CHUNK == 0:
                    start = [list(weights) for weights in now]
                ask = partial(zip, start, range(5 * h, 5 * h + 5), strict=True)
                k, v, steps, keeps, _ = (answer(xs[t, h], weights, m) for weights, m in ask())
                outputs.append(answer(qs[t, h], start[4], 5 * h + 4))
                k, v = k / k.norm(), v / v.norm()
                raw = steps @ step + layer.gates.readout.step_bias[h, 0]
                eta = torch.sigmoid(raw[1]) if config.momentum else 0.0
                theta = bound * (1 - eta) * torch.sigmoid(raw[0])
                alpha = torch.sigmoid(keeps @ keep + layer.gates.readout.keep_bias[h, 0])
                for m, (weights, place) in enumerate(ask()):
                    own_value = answer(v, weights, place)
                    met = [w.clone() for w in weights]  # the value is constant: only M(k) has a gradient
                    loss = (answer(k, met, place) - own_value).square().sum()
                    gradients = torch.autograd.grad(loss, met, create_graph=True)
                    for n, (z, g) in enumerate(zip((k, F.gelu(k @ met[0])), gradients, strict=True)):
                        short = theta / (1 + theta * z.square().sum()) if config.rule == "dgd" else theta
                        origin = begin[m][n] if config.forget_to == "start" else 0.0
                        held = (1 - alpha) * (now[m][n] - origin)
                        if config.rule == "dgd":
                            held = held - short * torch.outer(z, z @ held)
                        still[m][n] = eta * still[m][n] - short * g
                        now[m][n] = origin + held + still[m][n]
            y = torch.stack(outputs)
            heads.append(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * layer.output_norm.weight)
        rows.append(torch.cat(heads, -1))
    return torch.stack(rows)


def compare(mine, other, leaves):
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(mine)
    found = (torch.autograd.grad(y, leaves, upstream, materialize_grads=True) for y in (mine, other))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("memory", [
    {}, {"forget_to": "zero", "alpha_init": 0.2, "norm": False}, {"rule": "titans", "momentum": True},
], ids=str)  # fmt: skip
def test_it_equals_the_definition_by_autograd(memory):
    found, x = layer(**memory), inputs()
    compare(found(x)[0], definition(found, x), [x, *found.parameters()])


@pytest.mark.parametrize("memory", [
    {}, {"depth": 3, "per_layer_gates": True}, {"gates": "hard", "theta": "free", "rule": "titans", "momentum": True},
    {"rule": "yaad"}, {"rule": "memora", "depth": 1}, {"rule": "atlas", "atlas": {"window": 2}},
    {"rule": "omega", "omega": {"window": 3, "degree": 2}},
], ids=str)  # fmt: skip
def test_any_rule_under_an_author_equals_its_definition(memory, monkeypatch):
    """Two rows with different documents continue from the middle of a chunk; the final states are also compared."""
    found, x = layer(**memory), inputs()
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[0, 4] = reset[1, 6] = reset[1, 7] = True

    def run():
        y, state = found(x[:, :3])
        more, state = found(x[:, 3:], state, Documents.of(reset[:, 3:], x.device))
        return torch.cat([y.flatten(), more.flatten(), *(t.flatten() for t in tensors(state))])

    mine = run()
    kernel = self_modifying.self_modifying_memory
    monkeypatch.setattr(self_modifying, "self_modifying_memory", partial(kernel, backend="naive"))
    compare(mine, run(), [x, *found.parameters()])


def test_a_chunk_sees_nothing_of_itself_but_the_convolutions():
    """All five memories use a token's update only from the next chunk on."""
    found, x = layer(), inputs().detach()
    changed = x.clone()
    changed[0, 0] += 1
    with torch.no_grad():
        differs = (found(x)[0] - found(changed)[0])[0].abs().amax(-1) > 1e-12
    assert differs.tolist() == [t < 3 or t >= CHUNK for t in range(T)]


@pytest.mark.parametrize("save_every, times", [(1, 1), (2, 2)])
def test_nothing_is_computed_again_where_all_blocks_are_kept(save_every, times):
    found, x, made = layer(save_every=save_every), inputs(4 * CHUNK), []
    written = found.written
    found.written = lambda *given: made.append(None) or written(*given)
    first, second = (
        torch.autograd.grad(each(x)[0].square().sum(), [x, *each.parameters()]) for each in (found, layer())
    )
    assert len(made) == 4 * times
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_memories_modify_themselves():
    """Without writes all tokens query M_0: the second chunk has other keys than with writes."""
    found, x, made = layer(), inputs(2 * CHUNK).detach(), []
    written = found.written
    found.written = lambda *given: made.append(written(*given)) or made[-1]
    with torch.no_grad():
        for writes in (True, False):
            found.gates.writes = writes
            found(x)
    kept = [block[0] for block in made]
    torch.testing.assert_close(kept[0], kept[2], rtol=0, atol=0)
    assert (kept[1] - kept[3]).abs().max() > 1e-3
    assert all(gate.count_nonzero() == 0 for gate in made[3][2:])


def test_its_products_are_counted(monkeypatch):
    counted = partial(
        self_modifying.self_modifying_memory, backend="chunked"
    )  # the counter counts PyTorch's products, not C's
    monkeypatch.setattr(self_modifying, "self_modifying_memory", counted)
    for rule in ("dgd", "titans"):
        found = layer(rule=rule, chunk_size=8)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            found(inputs(32))
        # The counter counts coefficients, which a head's memories share, but no triangular systems.
        seen = 2 * 8 * (1 + 8) * (2 if rule == "dgd" else 1)
        unseen = 5 * 8 * sum(d_out for _, d_out in found.shape.layers) if rule == "dgd" else 0
        counted = found.flops(32).forward + H * (seen - unseen)
        assert counter.get_total_flops() / 64 == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("memory", [{}, {"norm": False, "forget_to": "zero"}], ids=str)
def test_taught_by_its_own_answers_it_does_not_grow(memory):
    """Values have unit length: with longer values, as the paper prints, the second memory is NaN by token 200."""
    torch.manual_seed(0)
    found = SelfModifyingMemory(32, 2, 4, MemoryConfig(**{"rule": "dgd", "momentum": False} | memory), 1e-5)
    found.gates.own_initialisation()
    with torch.no_grad():
        _, state = found(torch.randn(1, 208, 32))
    begin, _ = found.network.learned()
    for now, first in zip(state.memory.weights, begin, strict=True):
        assert now.norm() < 1.2 * first.norm()
