"""The dual form against the definition, in float64, and against flash-linear-attention's reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import layer_norm

from titans_pt.kernels.ttt_memory import TTTState, ttt_memory
from titans_pt.kernels.ttt_memory import dual as dual_module
from titans_pt.kernels.ttt_memory import state as state_module

TOLERANCE = 1e-9


def make(B, T, H, D, C, *, hidden=None, seed=0) -> tuple[list[torch.Tensor], int]:
    """A list of q, k, v, rate, tau, weights and biases layer by layer, norm; and the number of layers."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k, v = (rand(B, T, H, D) for _ in range(3))
    rate = 0.3 * rand(B, T, H).sigmoid()
    tau = (1 / torch.arange(1, C + 1, dtype=torch.float64) + 0.3 * rand(C)).clamp(min=0)
    widths = [D, D] if hidden is None else [D, hidden, D]
    layers = [p for a, b in zip(widths[:-1], widths[1:], strict=True) for p in (rand(H, a, b), rand(H, b))]
    return [q, k, v, rate, tau, *layers, 1 + 0.3 * rand(H, D), 0.3 * rand(H, D)], len(widths) - 1


def call(leaves, layers, **options):
    parameters = leaves[5 : 5 + 2 * layers]
    return ttt_memory(
        *leaves[:5], tuple(parameters[::2]), tuple(parameters[1::2]), tuple(leaves[5 + 2 * layers :]),
        output_final_state=True, **options,
    )  # fmt: skip


def initial(B, H, tensors, layers, C, seed):
    """A state inside a mini-batch; rows at a mini-batch's start have zero sums."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(B, *p.shape) for p in tensors[5 : 5 + 2 * layers]]
    start, sums = ([0.5 * torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes] for _ in range(2))
    offset = torch.randint(0, C, (B,), generator=draw)
    sums = [torch.where((offset == 0).view(-1, *[1] * (s.dim() - 1)), 0.0, s) for s in sums]
    return [*start, *sums], offset


def run(backend, tensors, layers, *, state=None, **options):
    """Outputs and final state, gradients of a random weighting of all of them, final offset."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    given = []
    if state is not None:
        given = [x.clone().requires_grad_() for x in state[0]]
        options["initial_state"] = TTTState(tuple(given[: 2 * layers]), tuple(given[2 * layers :]), state[1].clone())
    out, end = call(leaves, layers, backend=backend, **options)
    results = [out, *end.start, *end.sums]
    draw = torch.Generator().manual_seed(99)
    total = sum((r * torch.randn(r.shape, generator=draw, dtype=r.dtype)).sum() for r in results)
    return results, torch.autograd.grad(total, leaves + given, materialize_grads=True), end.offset


def assert_same(a, b, tolerance=TOLERANCE):
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        error = (x - y).abs().max().item()
        assert error <= tolerance * max(1.0, y.abs().max().item()), f"{n}: {error:.1e}"


@settings(max_examples=30)
@given(
    B=st.integers(1, 3), T=st.sampled_from([1, 2, 15, 17, 33]), H=st.integers(1, 2), D=st.sampled_from([2, 6]),
    hidden=st.sampled_from([None, 5]), C=st.sampled_from([1, 4, 16]), resets=st.sampled_from([0.0, 0.1, 0.5]),
    continued=st.booleans(), save_every=st.sampled_from([None, 1]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_dual_equals_naive(B, T, H, D, hidden, C, resets, continued, save_every, seed):
    tensors, layers = make(B, T, H, D, C, hidden=hidden, seed=seed)
    options = {}
    if resets:
        options["reset"] = torch.rand(B, T, generator=torch.Generator().manual_seed(seed + 1)) < resets
    if continued:
        options["state"] = initial(B, H, tensors, layers, C, seed + 2)
    out, grad, offset = run("dual", tensors, layers, save_every=save_every, **options)
    out_, grad_, offset_ = run("naive", tensors, layers, **options)
    assert_same(out, out_)
    assert_same(grad, grad_)
    assert torch.equal(offset, offset_)


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 39), max_size=4, unique=True), hidden=st.sampled_from([None, 5]),
       resets=st.booleans(), backend=st.sampled_from(["naive", "auto"]))  # fmt: skip
def test_cuts_are_invisible(cuts, hidden, resets, backend):
    tensors, layers = make(2, 40, 2, 4, 16, hidden=hidden)
    reset = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.1 if resets else None
    with torch.no_grad():
        whole, end = call(tensors, layers, reset=reset, backend=backend)
        pieces, state = [], None
        for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 40], strict=True):
            part = [*(x[:, a:b] for x in tensors[:4]), *tensors[4:]]
            out, state = call(
                part, layers, initial_state=state, reset=None if reset is None else reset[:, a:b], backend=backend
            )
            pieces.append(out)
    assert_same([torch.cat(pieces, 1), *state.start, *state.sums], [whole, *end.start, *end.sums])
    assert torch.equal(state.offset, end.offset)


def test_a_mini_batch_is_one_step_of_gradient_descent():
    """With tau = 1 and one rate, the weights after 16 tokens are those of plain autograd on the tokens' summed loss."""
    tensors, _ = make(1, 16, 1, 4, 16)
    q, k, v, rate, tau, weight, bias, gain, shift = tensors
    rate, tau = torch.full_like(rate, 0.1), torch.ones_like(tau)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    k_1, v_1 = k[0, :, 0], v[0, :, 0]
    error = k_1 + layer_norm(k_1 @ weight[0] + bias[0], (4,), gain[0], shift[0], 1e-6) - v_1
    d_weight, d_bias = torch.autograd.grad(0.5 * error.square().sum(), (weight, bias))
    _, end = call([q, k, v, rate, tau, weight, bias, gain, shift], 1)
    assert_same([p[0] for p in end.start], [weight - 0.1 * d_weight, bias - 0.1 * d_bias], 1e-12)
    assert end.offset.tolist() == [0] and not any(s.any() for s in end.sums)


@pytest.mark.filterwarnings("ignore")
def test_fla_ttt_linear(reference, monkeypatch):
    """chunk_ttt_linear_ref with scale=1, weights from 0, whole mini-batches, eta = tau_i times one rate for all tokens.

    With different rates it is another model, because it takes the reading token's rate. It returns z + LN(z) where the
    paper has q + LN(z). Without weight, bias and eps, LN(z) is also the LN of z + LN(z).
    """
    ours_is = reference("fla", "ops.ttt.naive", "chunk_ttt_linear_ref")
    for module in (dual_module, state_module):
        monkeypatch.setattr(module, "EPS", 1e-30)
    (q, k, v, rate, tau, weight, bias, gain, shift), _ = make(2, 48, 2, 6, 16)
    gain, shift = torch.ones_like(gain), torch.zeros_like(shift)
    start = (0.3 * weight).expand(2, -1, -1, -1), bias.unsqueeze(-2).expand(2, -1, -1, -1)
    rate = torch.full_like(rate, 0.1)
    eta = (0.1 * tau).repeat(3).view(1, 48, 1, 1).expand(2, 48, 2, 1)
    out, W, b = ours_is(
        q.clone(), k, v, gain, shift, eta.clone(), scale=1.0, eps=1e-30, initial_state=start[0].clone(),
        initial_state_bias=start[1].clone(), output_final_state=True,
    )  # fmt: skip
    mine, end = call([q, k, v, rate, tau, 0.3 * weight, bias, gain, shift], 1)
    unit = layer_norm(out, (6,), eps=1e-30)
    assert_same([mine - q, end.start[0], end.start[1]], [unit, W, b.squeeze(-2)], 1e-11)


def test_half_precision_computes_in_fp32():
    tensors, layers = make(1, 20, 2, 4, 16, hidden=8)
    half = [x.bfloat16() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out, end = call(half, layers)
    expected, exact = call([x.double() for x in half], layers)
    assert out.dtype == torch.bfloat16 and all(p.dtype == torch.float32 for p in (*end.start, *end.sums))
    assert_same([out], [expected.bfloat16()], 2**-6)
    assert_same(end.start, exact.start, 1e-4)


@pytest.mark.parametrize("save_every, sets", [(None, 8), (1, 64), (60, 2)])
def test_parameter_sets_kept_for_the_backward_pass(save_every, sets, monkeypatch):
    """The default is the square root of the number of mini-batches (64 here)."""
    kept, checkpoint = [], dual_module.checkpoint

    def record(*given, **options):
        kept.append(given)
        return checkpoint(*given, **options)

    monkeypatch.setattr(dual_module, "checkpoint", record)
    tensors, layers = make(1, 64 * 4, 1, 4, 4)
    call(tensors, layers, save_every=save_every)
    assert len(kept) == sets


@pytest.mark.thorough
def test_torch_compile_leaves_the_loop_alone(monkeypatch):
    """A mini-batch is one program for all lengths and documents, and a second one where no row completes it."""
    from torch._dynamo.backends.debugging import aot_eager

    from titans_pt.kernels import compiling

    programs = []

    def backend(graph, example):
        programs.append(graph)
        return aot_eager(graph, example)

    monkeypatch.setattr(compiling, "compiled", lambda step: torch.compile(step, dynamic=False, backend=backend))
    compiled = torch.compile(call, backend="eager")

    def both(T, **options):
        tensors, layers = make(2, T, 1, 4, 4)
        q = tensors[0].requires_grad_()
        totals = [f([q, *tensors[1:]], layers, **options)[0].square().sum() for f in (compiled, call)]
        torch.testing.assert_close(*(torch.autograd.grad(total, q) for total in totals))
        return len(programs)

    reset = torch.zeros(2, 24, dtype=torch.bool)
    reset[0, 6] = reset[1, 9] = True
    torch._dynamo.reset()
    assert [both(40), both(24), both(32), both(24, reset=reset), both(25)] == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("change, message", [
    ({"v": torch.zeros(1, 6, 2, 5)}, "q, k, v must share one shape"),
    ({"rate": torch.zeros(1, 6)}, "rate must be"),
    ({"tau": torch.zeros(())}, "tau must have one entry"),
    ({"weights": (torch.zeros(2, 4, 5),)}, "weights must be one or two"),
    ({"biases": (torch.zeros(2, 5),)}, "biases must be"),
    ({"norm": (torch.zeros(2, 4),)}, "norm must be two"),
    ({"reset": torch.zeros(1, 6)}, "reset must be bool"),
    ({"backend": "triton"}, "backend 'triton' is none of"),
])  # fmt: skip
def test_says_what_does_not_fit(change, message):
    (q, k, v, rate, tau, weight, bias, *norm), _ = make(1, 6, 2, 4, 16)
    given = {"q": q, "k": k, "v": v, "rate": rate, "tau": tau, "weights": (weight,), "biases": (bias,),
             "norm": tuple(norm)}  # fmt: skip
    with pytest.raises(ValueError, match=f"ttt_memory: {message}"):
        ttt_memory(**(given | change))


def test_the_states_that_are_kept_are_seen_by_those_who_count():
    """Plans measure a model by torch's hooks on saved tensors, which must include the states between groups."""
    tensors, layers = make(2, 16, 1, 8, 2, hidden=32)
    leaves = [x.requires_grad_() for x in tensors]
    seen: dict[int, int] = {}

    def pack(x):
        seen[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, _ = call(leaves, layers, backend="dual", save_every=2)
    out.sum().backward()
    one_row = sum(p.numel() for p in tensors[5 : 5 + 2 * layers])
    states = 3 * 2 * 2 * one_row  # three saved states of start and sums, two rows
    assert sum(seen.values()) > states


def test_a_state_of_another_memory_is_refused():
    (q, k, v, rate, tau, weight, bias, *norm), _ = make(1, 10, 2, 4, 16)
    given = {"weights": (weight,), "biases": (bias,), "norm": tuple(norm)}
    _, state = ttt_memory(q, k, v, rate, tau, output_final_state=True, **given)
    one = [x[:, :1] for x in (q, k, v, rate)]
    with pytest.raises(ValueError, match="initial_state has read 10 tokens of a mini-batch, of which this one has 2"):
        ttt_memory(*one, tau[:2], initial_state=state, **given)
    two = [x.expand(2, *x.shape[1:]) for x in one]
    with pytest.raises(ValueError, match="initial_state is of another memory or batch: its start"):
        ttt_memory(*two, tau, initial_state=state, **given)
    longer = TTTState(state.start, state.sums, state.offset.repeat(2))
    with pytest.raises(ValueError, match="initial_state has counted the tokens of 2 rows, q has 1"):
        ttt_memory(*one, tau, initial_state=longer, **given)


def test_the_definition_in_inference_mode():
    tensors, layers = make(1, 5, 2, 4, 3)
    expected = call(tensors, layers, backend="naive")[0]
    with torch.inference_mode():
        found = call([t.clone() for t in tensors], layers, backend="naive")[0]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_the_definition_carries_tangents():
    tensors, layers = make(1, 5, 2, 4, 3)
    weight, along = tensors[5], torch.randn_like(tensors[5])

    def outputs(weight):
        return call([*tensors[:5], weight, *tensors[6:]], layers, backend="naive")[0]

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, along)
        found = torch.autograd.forward_ad.unpack_dual(outputs(dual)).tangent
    expected = (outputs(weight + 1e-6 * along) - outputs(weight - 1e-6 * along)) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_resets_of_the_definition_may_be_on_another_device():
    tensors, layers = make(2, 6, 1, 4, 4)
    tensors = [x.to("meta") for x in tensors]
    start = tuple(x.expand(2, *x.shape) for x in tensors[5:7])
    state = TTTState(start, start, torch.zeros(2, dtype=torch.int64, device="meta"))
    reset = torch.zeros(2, 6, dtype=torch.bool)
    out, _ = call(tensors, layers, initial_state=state, reset=reset, backend="naive")
    assert out.is_meta
