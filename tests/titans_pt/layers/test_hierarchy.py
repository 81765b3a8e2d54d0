"""TNT's memories against an oracle that reads token by token, in float64."""

import pytest
import torch
import torch.nn.functional as F

from titans_pt.config import HierarchyConfig, MemoryConfig
from titans_pt.config.files import load_config
from titans_pt.kernels.memory import neural_memory
from titans_pt.layers.documents import Documents
from titans_pt.layers.hierarchy import HierarchicalMemory
from titans_pt.layers.state import map_tensors

WIDTH, HEADS = 12, 3


def make(chunk=6, shard=12, locals_=(4, 3), projection=True, rule="titans", **memory):
    torch.manual_seed(0)
    own = load_config("quickstart", [f"model.memory.rule={rule}"]).model.memory.section(rule)
    hierarchy = HierarchyConfig(chunk=chunk, shard=shard, locals=list(locals_), projection=projection)
    config = MemoryConfig(expansion=2, hierarchy=hierarchy, alpha_init=0.05, step_bound=0.1, rule=rule,
                          **{rule: own}, **memory)  # fmt: skip
    layer = HierarchicalMemory(WIDTH, HEADS, 4, config, 1e-5).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def oracle(layer, x, start=None):
    """Read one document from its start, token by token."""
    q, k, v = (projection(x)[0] for projection in (layer.q, layer.k, layer.v))

    def read(n, q, k, v, x, stale):
        memory = layer.memories[n]
        weights, norm = memory.network()
        theta, eta, alpha, *own = memory.gates(x, v)
        return neural_memory(
            q, k, v, theta, eta, alpha, weights if start is None else start[n], network=memory.shape, norm=norm,
            chunk_size=memory.config.chunk_size, forget_to=layer.config.forget_to, backend="naive", stale=stale,
            rule=memory.gates.rule, own=tuple(own),
        )[0]  # fmt: skip

    y = read(0, q, k, v, x, True)
    shard = layer.hierarchy.shard
    for n in range(1, len(layer.memories)):
        parts = []
        for begin in range(0, x.shape[1], shard):
            here = slice(begin, begin + shard)
            asked = q[:, here]
            if layer.hierarchy.projection:
                keys, outputs = k.new_zeros(len(x), HEADS, WIDTH // HEADS, WIDTH // HEADS), []
                for t in range(begin, min(begin + shard, x.shape[1])):
                    keys = keys + k[:, t, :, :, None] * k[:, t, :, None, :]
                    outputs.append((keys @ q[:, t, :, :, None]).squeeze(-1))
                asked = F.normalize(torch.stack(outputs, 1), dim=-1, eps=1e-6)
            parts.append(read(n, asked, k[:, here], v[:, here], x[:, here], False))
        y = y + torch.cat(parts, 1)
    return layer.output_norm(y).flatten(-2)


@pytest.mark.parametrize("rule", ["muon", "lact", "moneta"])
@pytest.mark.parametrize("locals_", [(), (4,)])
def test_every_token_of_a_prefix_is_written_to_every_memory(rule, locals_):
    """This holds also for rules that write at chunk ends, with a prefix shorter than the global memory's chunk."""
    layer = make(chunk=32, shard=32, locals_=locals_, rule=rule)
    prefix = torch.randn(1, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    for weights in layer.start_after(prefix)[1]:
        (gradient,) = torch.autograd.grad(sum(w.square().sum() for w in weights), prefix, retain_graph=True)
        each = gradient[0].norm(dim=-1)
        assert each.min() > 1e-3 * each.max()


@pytest.mark.parametrize("options", [
    {}, {"projection": False}, {"locals_": ()}, {"locals_": (12,), "chunk": 12}, {"forget_to": "start"},
    {"momentum": False, "forgetting": False}, {"gates": "hard", "per_layer_gates": True},
    {"rule": "moneta"}, {"rule": "lact"}, {"rule": "omega"},
])  # fmt: skip
@pytest.mark.parametrize("length", [5, 12, 36, 41])
def test_equals_the_oracle(options, length):
    layer = make(**options)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    outer = torch.randn(2, length, WIDTH, dtype=torch.float64)
    asked = [x, *layer.parameters()]
    results = []
    for y in (layer(x)[0], oracle(layer, x)):
        results.append((y, torch.autograd.grad((y * outer).sum(), asked, materialize_grads=True)))
    found, expected = results
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", [[1], [11], [12], [13, 24], [5, 6, 7, 30], list(range(1, 40))])
@pytest.mark.parametrize("rule", ["titans", "moneta"])
@pytest.mark.parametrize("prefix", [False, True])
def test_cuts_are_invisible(cuts, prefix, rule):
    layer, start = make(forget_to="start", rule=rule), None
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        if prefix:
            _, start = layer.start_after(torch.randn(1, 5, WIDTH, dtype=torch.float64))
        whole, end = layer(x, start=start)
        torch.testing.assert_close(whole, oracle(layer, x, start), rtol=0, atol=1e-9)
        state, pieces = None, []
        for a, b in zip([0, *cuts], [*cuts, 40], strict=True):
            y, state = layer(x[:, a:b], state, start=start if a == 0 else None)
            pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)
    found, expected = [], []
    map_tensors(state, lambda t: found.append(t) or t)
    map_tensors(end, lambda t: expected.append(t) or t)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("cut", [None, 17, 20])
def test_documents_are_as_if_alone(cut):
    layer = make()
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[0, [7, 20]] = reset[1, 33] = True
    with torch.no_grad():
        pieces, state = [], None
        for here in (slice(0, 40),) if cut is None else (slice(0, cut), slice(cut, 40)):
            y, state = layer(x[:, here], state, Documents.of(reset[:, here], x.device))
            pieces.append(y)
        found = torch.cat(pieces, 1)
        for row, edges in ((0, [0, 7, 20, 40]), (1, [0, 33, 40])):
            for a, b in zip(edges[:-1], edges[1:], strict=True):
                alone = layer(x[row : row + 1, a:b])[0]
                torch.testing.assert_close(found[row : row + 1, a:b], alone, rtol=0, atol=1e-9)


def test_no_token_sees_a_later_one_or_another_row():
    layer = make()
    x = torch.randn(2, 30, WIDTH, dtype=torch.float64)
    other = x.clone()
    other[0, 19:] += 1
    with torch.no_grad():
        a, b = layer(x)[0], layer(other)[0]
    assert torch.equal(a[0, :19], b[0, :19]) and torch.equal(a[1], b[1]) and not torch.equal(a[0, 19], b[0, 19])


def test_the_last_part_of_a_training_has_smaller_chunks():
    torch.manual_seed(0)
    levels = HierarchyConfig(chunk=6, shard=12, locals=[6, 4], final_locals=[2, 4], final_share=0.25)
    layer = HierarchicalMemory(WIDTH, HEADS, 4, MemoryConfig(expansion=2, hierarchy=levels), 1e-5).double()
    bounds = [memory.gates.bound for memory in layer.memories]
    x, found = torch.randn(2, 30, WIDTH, dtype=torch.float64), {}
    for done in (0.0, 0.75, 0.76, 1.0):
        layer.set_progress(done)
        found[done] = layer(x)[0]
    assert torch.equal(found[0.0], found[0.75]) and torch.equal(found[0.76], found[1.0])
    assert not torch.equal(found[0.0], found[1.0])
    assert [memory.gates.bound for memory in layer.memories] == bounds
