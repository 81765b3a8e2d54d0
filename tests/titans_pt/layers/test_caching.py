"""Memory Caching against an oracle that reads token by token, in float64."""

import pytest
import torch

from titans_pt.config import CachingConfig, MemoryConfig
from titans_pt.kernels.memory import memory_read, neural_memory
from titans_pt.layers.caching import NONE
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import NeuralMemory
from titans_pt.layers.state import state_bytes, take_rows, tensors

WIDTH, HEADS, LENGTH = 12, 3, 45


def make(segment=8, slots=3, chunk_size=4, rule="titans", memory=None, **caching):
    torch.manual_seed(0)
    config = MemoryConfig(
        rule=rule, expansion=2, chunk_size=chunk_size, alpha_init=0.05, **(memory or {}),
        caching=CachingConfig(segment=segment, slots=slots, **caching),
    )  # fmt: skip
    layer = NeuralMemory(WIDTH, HEADS, 4, config, 1e-5).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        if layer.caching.u is not None:
            layer.caching.u.weight.mul_(4)  # makes the shares differ
    return layer


def kept(numbers, now, config):
    """Numbers of the cached segments once segment ``now`` has ended."""
    return [*numbers, now][-config.slots :]


def oracle(layer, x):
    """Read one document from its start, token by token: the memory by autograd (naive), shares by loops."""
    config, rule = layer.config.caching, layer.gates.rule
    q, k, v = (projection(x)[0] for projection in (layer.q, layer.k, layer.v))
    weights, norm = layer.network()
    theta, eta, alpha, *own = layer.gates(x, v)
    rows, state = len(x), None
    u = None if layer.caching.u is None else layer.caching.u(x).unflatten(-1, (HEADS, -1))
    ended, numbers, outputs = [], [], []  # for every segment: last weights, mean key
    for t in range(x.shape[1]):
        here = slice(t, t + 1)
        if config.fresh and t % config.segment == 0:
            state = None
        met = state.chunk_weights if state else tuple(map(rule.met, (w.expand(rows, *w.shape) for w in weights)))
        y, state = neural_memory(
            q[:, here], k[:, here], v[:, here], theta[:, here], eta[:, here], alpha[:, here], weights, norm=norm,
            network=layer.shape, rule=rule, own=tuple(g[:, here] for g in own), chunk_size=layer.config.chunk_size,
            forget_to=layer.config.forget_to, initial_state=state, output_final_state=True, backend="naive",
        )  # fmt: skip
        running = met if rule.nonlinear else state.weights
        begin = t - t % config.segment
        answers = [y[:, 0]]
        pools = [k[:, begin : t + 1].mean(1)]
        ages = [0]
        for n in numbers:
            answers.append(memory_read(q[:, here], ended[n][0], network=layer.shape, norm=norm, rule=rule)[:, 0])
            pools.append(ended[n][1])
            ages.append(t // config.segment - n)
        if config.shares == "sum":
            shares = [1.0] * len(ages)
        elif config.shares == "change":
            shares = []
        elif config.shares == "average":
            total = sum(config.decay**age for age in ages)
            shares = [config.decay**age / total for age in ages]
        else:
            scores = torch.stack([(u[:, t] * pool).sum(-1) for pool in pools], -1)
            if config.shares == "sparse":
                for row in range(rows):
                    for head in range(HEADS):
                        order = scores[row, head, 1:].argsort(descending=True)[config.top :] + 1
                        for n in order.tolist():
                            scores[row, head, n] = -torch.inf
            shares = list(scores.softmax(-1).unsqueeze(-1).unbind(-2))
        if config.soup:
            every = [running, *(ended[n][0] for n in numbers)]
            every = [tuple((s.unsqueeze(-1) if torch.is_tensor(s) else s) * w for w in ws)
                     for s, ws in zip(shares, every, strict=True)]  # fmt: skip
            mean = tuple(sum(layers) for layers in zip(*every, strict=True))
            outputs.append(memory_read(q[:, here], mean, network=layer.shape, norm=norm, rule=rule)[:, 0])
        elif config.shares == "change":
            first = tuple(rule.met(w.expand(rows, *w.shape)) for w in weights)
            seen = [memory_read(q[:, here], first, network=layer.shape, norm=norm, rule=rule)[:, 0]]
            seen += [*answers[1:], answers[0]]
            earlier = len(answers) * seen[:1] if config.fresh else seen[:-1]
            changes = [((b - a).square().sum(-1) + 1e-12).sqrt() for a, b in zip(earlier, seen[1:], strict=True)]
            changes = torch.stack(changes, -1)
            shares = (changes / changes.amax(-1, keepdim=True)) ** config.sharpness
            shares = list((shares / shares.sum(-1, keepdim=True)).unsqueeze(-1).unbind(-2))
            outputs.append(sum(s * a for s, a in zip(shares, seen[1:], strict=True)))
        else:
            outputs.append(sum(s * a for s, a in zip(shares, answers, strict=True)))
        if (t + 1) % config.segment == 0:
            last = state.chunk_weights if rule.nonlinear else state.weights
            ended.append((last, k[:, begin : t + 1].mean(1)))
            numbers = kept(numbers, t // config.segment, config)
    return layer.output_norm(torch.stack(outputs, 1)).flatten(-2)


FORMS = [
    {}, {"slots": 1}, {"slots": 9}, {"shares": "sparse", "top": 1}, {"shares": "sparse", "top": 2},
    {"shares": "average"}, {"shares": "average", "decay": 0.6}, {"shares": "sum"}, {"soup": True},
    {"shares": "change"}, {"shares": "change", "slots": 2, "sharpness": 2.5}, {"fresh": True},
    {"shares": "change", "fresh": True}, {"soup": True, "fresh": True},
    {"soup": True, "shares": "average", "decay": 0.5}, {"soup": True, "shares": "sparse", "top": 1, "slots": 4},
]  # fmt: skip
MEMORIES = [
    {}, {"memory": {"depth": 1}}, {"memory": {"depth": 3, "per_layer_gates": True}}, {"memory": {"forget_to": "zero"}},
    {"memory": {"alpha": "channel"}}, {"rule": "yaad"}, {"rule": "moneta"}, {"rule": "omega"}, {"rule": "muon"},
    {"chunk_size": 1, "segment": 5}, {"chunk_size": 8},
]  # fmt: skip
CHANGE = {"shares": "change", "fresh": True}
CASES = FORMS + [memory | form for memory in MEMORIES[1:] for form in ({}, {"soup": True}, CHANGE)]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(options):
    """Gradients by autograd of every parameter and the input agree to 1e-9 of the largest value."""
    layer = make(**options)
    length = LENGTH if options in FORMS else 21  # two full segments and a part
    found = []
    for run in (lambda x: layer(x)[0], lambda x: oracle(layer, x)):
        torch.manual_seed(1)
        x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
        y = run(x)
        leaves = [x, *layer.parameters()]
        found.append([y, *torch.autograd.grad((y * torch.randn_like(y)).sum(), leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).abs().max() <= 1e-9 * theirs.abs().max().clamp(min=1e-3)


def test_learned_shares_have_a_gradient_where_nothing_is_cached_yet():
    """The gradient is zero, not None: other ranks may have cached segments."""
    layer = make(segment=8)
    layer(torch.randn(2, 7, WIDTH, dtype=torch.float64))[0].sum().backward()
    assert layer.caching.u.weight.grad.abs().max() == 0


STREAMED = [
    {}, {"shares": "change"}, CHANGE, {"fresh": True, "slots": 2}, {"slots": 2}, {"soup": True},
    {"rule": "muon", "shares": "sparse", "top": 1},
]  # fmt: skip


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("options", STREAMED, ids=str)
def test_a_stream_may_be_cut_anywhere(options):
    layer = make(**options)
    x = random(2, LENGTH, WIDTH)
    whole, end = layer(x)
    for sizes in ([8] * 5 + [5], [3, 4, 1, 11, 13, 13], [1] * LENGTH):
        state, outputs = None, []
        for part in x.split(sizes, 1):
            y, state = layer(part, state)
            outputs.append(y)
        near(torch.cat(outputs, 1), whole)
        assert torch.equal(state.caches.numbers, end.caches.numbers) and torch.equal(
            state.caches.place, end.caches.place
        )
        for mine, theirs in zip(tensors(state.caches), tensors(end.caches), strict=True):
            near(mine, theirs)


@torch.no_grad()
@pytest.mark.parametrize("options", STREAMED, ids=str)
def test_every_document_of_a_packed_sample_is_read_as_if_alone(options):
    """Documents begin at different places in each row, inside segments and at their ends; the stream is also cut."""
    layer = make(**options)
    x, starts = random(3, LENGTH, WIDTH), {0: [0, 17, 40], 1: [0, 8, 9, 24], 2: [0]}
    reset = torch.zeros(3, LENGTH, dtype=torch.bool)
    for row, places in starts.items():
        reset[row, places[1:]] = True
    outputs, state = [], None
    for begin, end in ((0, 9), (9, 30), (30, LENGTH)):
        part = reset[:, begin:end]
        documents = Documents.of(part, torch.device("cpu")) if part.any() else None
        y, state = layer(x[:, begin:end], state, documents)
        outputs.append(y)
    y, after = torch.cat(outputs, 1), layer(x[:, :5], state)[0]
    for row, places in starts.items():
        for begin, end in zip(places, [*places[1:], LENGTH], strict=True):
            alone, last = layer(x[row : row + 1, begin:end])
            near(y[row, begin:end], alone[0])
        near(after[row], layer(x[row : row + 1, :5], last)[0][0])


@torch.no_grad()
@pytest.mark.parametrize("options", STREAMED, ids=str)
def test_nothing_leaks_from_the_future_or_from_other_rows(options):
    layer = make(**options)
    x = random(2, LENGTH, WIDTH)
    y = layer(x)[0]
    for place in (3, 15, 16, 38):
        changed = x.clone()
        changed[0, place] += 1
        other = layer(changed)[0]
        assert torch.equal(other[:, :place], y[:, :place]) and torch.equal(other[1], y[1])
        differs, kept, lost = (other[0] != y[0]).any(-1), LENGTH, LENGTH
        if layer.config.caching.fresh:  # a dropped cache's contents are lost; filters reach three tokens further
            kept, lost = (8 * (last // 8 + 1 + layer.config.caching.slots) for last in (place, place + 3))
        assert differs[place:kept].all() and not differs[lost:].any()


@torch.no_grad()
def test_a_stream_s_state_has_a_bounded_size_and_the_newest_caches():
    layer, state, sizes, found = make(segment=4, slots=4), None, [], []
    for _ in range(40):
        _, state = layer(random(1, 4, WIDTH), state)
        sizes.append(state_bytes(state))
        found.append(state.caches.numbers[0].tolist())
    assert sizes[0] < sizes[3] and set(sizes[3:]) == {sizes[3]}
    assert found == [list(range(max(0, n - 3), n + 1)) for n in range(40)]


@torch.no_grad()
def test_rows_of_a_state_may_be_taken_where_they_have_other_segments():
    layer, x = make(), random(2, 30, WIDTH)
    reset = torch.zeros(2, 30, dtype=torch.bool)
    reset[1, 11] = True
    _, state = layer(x, None, Documents.of(reset, torch.device("cpu")))
    assert state.caches.numbers.tolist() == [[0, 1, 2], [0, 1, NONE]]
    more = random(3, 20, WIDTH)
    y = layer(more, take_rows(state, torch.tensor([1, 0, 1])))[0]
    for n, row in enumerate((1, 0, 1)):
        near(y[n], layer(more[n : n + 1], take_rows(state, torch.tensor([row])))[0][0])


@torch.no_grad()
def test_the_oldest_caches_fall_out_of_a_full_set():
    caching = make(segment=4, slots=2).caching
    k = random(1, 4, HEADS, WIDTH // HEADS)
    caches = caching.begin(k)
    for n in range(5):
        (piece,) = caching.cut(caches, 4, None)
        caches = caching.after(caches, piece, k, (torch.full((1, HEADS, 1, 1), float(n)),))
    assert [float(w[0].mean()) for w in caches.weights] == [3.0, 4.0]


def test_a_prefix_is_not_cached():
    layer = make(segment=4)
    plain = NeuralMemory(WIDTH, HEADS, 4, layer.config.model_copy(update={"caching": None}), 1e-5).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = random(1, 9, WIDTH)
    for mine, theirs in zip((layer.start_after(x)[0], *layer.start_after(x)[1]),
                            (plain.start_after(x)[0], *plain.start_after(x)[1]), strict=True):  # fmt: skip
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_without_an_ended_segment_it_is_the_memory_alone():
    layer = make(segment=8)
    plain = NeuralMemory(WIDTH, HEADS, 4, layer.config.model_copy(update={"caching": None}), 1e-5).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = random(2, 20, WIDTH)
    mine, theirs = layer(x)[0], plain(x)[0]
    near(mine[:, :8], theirs[:, :8])
    assert (mine[:, 8:] - theirs[:, 8:]).abs().amax(-1).min() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("forget_to", ["zero", "start"])
@pytest.mark.parametrize("caching", [{"fresh": True}, {"shares": "change"}, {}], ids=str)
def test_a_stream_after_a_prefix_begins_again_where_the_whole_text_does(forget_to, caching):
    """Segments and shares return to the memory after the prefix, not to the learned M_0."""
    layer = make(memory={"forget_to": forget_to}, **caching)
    _, start = layer.start_after(random(1, 9, WIDTH))
    x = random(2, LENGTH, WIDTH)
    whole, _ = layer(x, start=start)
    first, after = layer(x[:, :19], start=start)
    second, _ = layer(x[:, 19:], after)
    near(torch.cat([first, second], 1), whole)
