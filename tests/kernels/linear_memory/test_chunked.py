"""The chunked form against the definition: outputs, final state and every gradient, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.linear_memory.cases import DECAYS, TOLERANCE, assert_same, make, run
from titans_pt.kernels.linear_memory import linear_memory


def compare(tensors, **options):
    for ours, theirs in zip(*(run(tensors, backend, **options) for backend in ("chunked", "naive")), strict=True):
        assert_same(ours, theirs)


@settings(max_examples=60)
@given(
    B=st.integers(1, 3), T=st.sampled_from([2, 3, 17, 63, 65, 100]), H=st.integers(1, 3),
    K=st.sampled_from([1, 4, 7]), V=st.sampled_from([1, 5, 8]), decay=st.sampled_from(DECAYS), delta=st.booleans(),
    erase=st.booleans(), steps=st.sampled_from([1, 1, 2, 3]),
    strength=st.sampled_from([0.01, 1.0, 40.0]), resets=st.sampled_from([0.0, 0.1, 0.7]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_chunked_equals_naive(B, T, H, K, V, decay, delta, erase, steps, strength, resets, seed):
    tensors = make(B, T, H, K, V, decay=decay, delta=delta, erase=erase, steps=steps, strength=strength, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    compare(tensors, reset=torch.rand(B, T, generator=draw) < resets if resets else None)


@pytest.mark.parametrize(
    "delta, erase, steps", [(False, False, 1), (True, False, 1), (True, True, 1), (False, True, 2)]
)
@pytest.mark.parametrize("decay", DECAYS)
def test_several_chunks_and_a_piece(decay, delta, erase, steps):
    compare(make(2, 150, 2, 8, 4, decay=decay, delta=delta, erase=erase, steps=steps, strength=0.05))


@pytest.mark.parametrize("steps, reset", [(1, False), (1, True), (3, False), (3, True)])
@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("decay", DECAYS)
def test_erase_and_write_keys_apart_by_the_definition(decay, backend, steps, reset):
    """With the transition as a matrix: S = (I - beta k e^T) diag(exp(g)) S + beta k v^T, in sub-steps."""
    tensors = make(2, 30, 2, 5, 3, decay=decay, erase=True, steps=steps)
    starts = torch.rand(2, 30, generator=torch.Generator().manual_seed(2)) < 0.2 if reset else None
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    q, k, v, beta, e, S = (leaves[n] for n in ("q", "k", "v", "beta", "erase", "initial_state"))
    outputs = []
    for t in range(30):
        if starts is not None:
            S = torch.where(starts[:, t, None, None, None], torch.zeros(()).double(), S)
        if decay != "none":
            g = leaves["decay"] if decay == "head" else leaves["decay"][:, t]
            S = (g if decay == "channel" else g.unsqueeze(-1).expand(*g.shape, 5)).exp().unsqueeze(-1) * S
        for n in range(t * steps, (t + 1) * steps):
            written = beta[:, n, :, None] * k[:, n]
            kept = torch.eye(5).double() - torch.einsum("bhk,bhl->bhkl", written, e[:, n])
            S = kept @ S + torch.einsum("bhk,bhv->bhkv", written, v[:, n])
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    expected = [torch.stack(outputs, 1), S]
    ours = list(linear_memory(**leaves, reset=starts, output_final_state=True, backend=backend))
    both = []
    for results in (ours, expected):
        draw = torch.Generator().manual_seed(3)
        total = sum((r * torch.randn(r.shape, generator=draw, dtype=r.dtype)).sum() for r in results)
        both.append([*results, *torch.autograd.grad(total, list(leaves.values()))])
    assert_same(*both, 1e-11)


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_decays_that_fp32_cannot_undo(decay, erase):
    """exp(-G) is infinite in fp32 from G = -89 on; here G reaches about -5,000 in a chunk."""
    tensors = make(2, 100, 2, 8, 8, decay=decay, erase=erase, strength=100.0, dtype=torch.float32)
    exact = {name: x.double() for name, x in tensors.items()}
    reset = torch.rand(2, 100, generator=torch.Generator().manual_seed(0)) < 0.05
    for ours, theirs in zip(run(tensors, "chunked", reset=reset), run(exact, "naive", reset=reset), strict=True):
        assert_same(ours, theirs, 1e-4)


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_weak_decays_after_one_that_leaves_nothing(decay, erase):
    """In fp32 a sum of -1e6 has steps of 0.06: differences of such sums lose decays of -0.05."""
    tensors = make(2, 100, 2, 8, 8, decay=decay, erase=erase, strength=0.05, dtype=torch.float32)
    tensors["decay"][:, ::10] = -1e6
    exact = {name: x.double() for name, x in tensors.items()}
    for ours, theirs in zip(run(tensors, "chunked"), run(exact, "naive"), strict=True):
        assert_same(ours, theirs, 1e-4)


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, 79), max_size=4, unique=True), decay=st.sampled_from(DECAYS), delta=st.booleans(),
       erase=st.booleans(), steps=st.sampled_from([1, 2]), resets=st.booleans(),
       backend=st.sampled_from(["naive", "chunked"]))  # fmt: skip
def test_cuts_are_invisible(cuts, decay, delta, erase, steps, resets, backend):
    tensors = make(2, 80, 2, 4, 6, decay=decay, delta=delta, erase=erase, steps=steps)
    state = tensors.pop("initial_state")
    reset = torch.rand(2, 80, generator=torch.Generator().manual_seed(1)) < 0.05 if resets else None
    options = dict(output_final_state=True, backend=backend)
    whole, end = linear_memory(**tensors, initial_state=state, reset=reset, **options)
    pieces = []
    for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 80], strict=True):
        part = {name: x if x.dim() == 1 else x[:, a * (n := x.shape[1] // 80) : b * n] for name, x in tensors.items()}
        out, state = linear_memory(
            **part, initial_state=state, reset=None if reset is None else reset[:, a:b], **options
        )
        pieces.append(out)
    assert_same([torch.cat(pieces, 1), state], [whole, end], TOLERANCE)


def test_without_a_state_it_starts_at_zero():
    tensors = make(2, 20, 2, 4, 6)
    zero = torch.zeros_like(tensors.pop("initial_state"))
    given, state = linear_memory(**tensors, initial_state=zero)
    assert state is None
    assert torch.equal(linear_memory(**tensors)[0], given)


def test_half_precision_computes_in_fp32():
    tensors = make(1, 70, 2, 4, 4)
    state = tensors.pop("initial_state")
    half = {name: x.bfloat16() for name, x in tensors.items()}
    exact = {name: x.double() for name, x in half.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out, end = linear_memory(**half, initial_state=state.float(), output_final_state=True)
    expected, last = linear_memory(**exact, initial_state=state.float().double(), output_final_state=True)
    assert out.dtype == torch.bfloat16 and end.dtype == torch.float32
    assert_same([out], [expected.bfloat16()], 2**-7)
    assert_same([end], [last], 1e-5)


@pytest.mark.thorough
def test_torch_compile_takes_it_whole():
    tensors = make(1, 70, 2, 4, 4)
    q = tensors.pop("q").requires_grad_()
    reset = torch.rand(1, 70, generator=torch.Generator().manual_seed(0)) < 0.1

    def total(q):
        return linear_memory(q, **tensors, reset=reset)[0].square().sum()

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(q), q), torch.autograd.grad(total(q), q))


@pytest.mark.parametrize("change, message", [
    ({"k": torch.zeros(2, 6, 2, 5)}, "q must be .* k the same or with n keys"),
    ({"k": torch.zeros(2, 9, 2, 4)}, "q must be .* k the same or with n keys"),
    ({"v": torch.zeros(2, 7, 2, 4)}, "v must be"),
    ({"decay": torch.zeros(2, 6)}, "decay must be"),
    ({"beta": torch.zeros(2, 6, 1)}, "beta must be"),
    ({"erase": torch.zeros(2, 6, 2)}, "erase must be"),
    ({"initial_state": torch.zeros(2, 2, 3, 4)}, "initial_state must be"),
    ({"reset": torch.zeros(2, 6)}, "reset must be bool"),
    ({"backend": "triton"}, "backend 'triton' is none of"),
    ({"backend": "fla"}, 'backend "fla" does not serve this: '),
])  # fmt: skip
def test_says_what_does_not_fit(change, message):
    tensors = make(2, 6, 2, 4, 4)
    with pytest.raises(ValueError, match=f"linear_memory: {message}"):
        linear_memory(**(tensors | change))


@pytest.mark.parametrize("backend", ["chunked", "naive"])
def test_resets_may_be_on_another_device(backend):
    """A hierarchy of memories computes its resets on the CPU."""
    tensors = {name: x.to("meta") for name, x in make(2, 6, 1, 4, 4).items()}
    out, _ = linear_memory(**tensors, reset=torch.zeros(2, 6, dtype=torch.bool), backend=backend)
    assert out.is_meta
