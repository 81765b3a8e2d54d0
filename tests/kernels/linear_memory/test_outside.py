"""The linear memory against other projects' code that runs on a CPU, and against our own deep memory.

fla-core 0.6.0's naive functions and transformers 5.23's PyTorch paths, both with their fp32 replaced by float64.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.linear_memory.cases import assert_same, make
from titans_pt.kernels.linear_memory import linear_memory
from titans_pt.kernels.memory import MemoryState, NetworkShape, neural_memory

B, T, H, K, V = 2, 70, 2, 8, 6
pytestmark = pytest.mark.filterwarnings("ignore")


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def grads(results, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of one random weighting of the results."""
    draw = torch.Generator().manual_seed(7)
    total = sum((r * torch.randn(r.shape, generator=draw, dtype=r.dtype)).sum() for r in results)
    return list(torch.autograd.grad(total, list(leaves.values())))


def compare(theirs, tensors: dict[str, Tensor], tolerance=1e-12, backend="chunked"):
    """Compare theirs(inputs by name) -> (outputs, final state) with the linear memory, gradients included."""
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    expected = list(theirs(**leaves))
    ours = list(linear_memory(**leaves, output_final_state=True, backend=backend))
    assert_same([*ours, *grads(ours, leaves)], [*expected, *grads(expected, leaves)], tolerance)


@pytest.mark.parametrize("strength", [0.5, 40.0])
@pytest.mark.parametrize("module, function, decay, delta", [
    ("linear_attn", "naive_recurrent_linear_attn", "none", False),
    ("simple_gla", "naive_recurrent_simple_gla", "token", False),
    ("gated_delta_rule", "naive_recurrent_gated_delta_rule", "token", True),
    ("kda", "naive_recurrent_kda", "channel", True),
])  # fmt: skip
def test_fla(reference, module, function, decay, delta, strength):
    """With scale=1. flash-linear-attention's name for decay is g; beta is also beta there."""
    call = reference("fla", f"ops.{module}.naive", function)
    names = {"decay": "g"}

    def theirs(**leaves):
        return call(**{names.get(n, n): x for n, x in leaves.items()}, scale=1.0, output_final_state=True)

    compare(theirs, make(B, T, H, K, V, decay=decay, delta=delta, strength=strength))


@pytest.mark.parametrize("strength", [0.5, 40.0])
def test_fla_gated_delta_net_2(reference, strength):
    """Its b gates the erased key, its w the values."""
    call = reference("fla", "ops.gdn2.naive", "naive_recurrent_gdn2")
    tensors = make(B, T, H, K, V, decay="channel", strength=strength)
    b = torch.rand(B, T, H, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def theirs(q, k, v, decay, erase, initial_state):
        w = torch.ones_like(v)
        return call(q, k, v, decay, erase / k, w, 1.0, initial_state, output_final_state=True)

    del tensors["beta"]
    compare(theirs, tensors | {"erase": b * tensors["k"]}, tolerance=1e-11)


@pytest.mark.parametrize("decay", ["none", "token"])
def test_fla_delta_product(reference, decay):
    call = reference("fla", "ops.gated_delta_product.naive", "naive_recurrent_gated_delta_product")

    def theirs(q, k, v, beta, initial_state, decay=None):
        return call(q, k, v, decay, beta, 1.0, None, initial_state, True, num_householder=3)

    compare(theirs, make(B, T, H, K, V, decay=decay, steps=3))


@pytest.mark.parametrize("strength", [0.5, 5.0])
def test_fla_rwkv_7(reference, strength):
    """Heads first, q scaled by K^-1/2. Its alpha reads S before the decay: two sub-steps, of which the first erases."""
    call = reference("fla", "ops.generalized_delta_rule.dplr.naive", "dplr_recurrence")
    tensors = make(B, T, H, K, V, decay="channel", strength=strength, steps=2, erase=True)
    del tensors["beta"]
    q, k, v, e = (tensors[n] for n in ("q", "k", "v", "erase"))
    v = torch.stack([torch.zeros(B, T, H, V), v[:, ::2]], 2).flatten(1, 2)
    e = torch.stack([e[:, ::2], torch.zeros(B, T, H, K)], 2).flatten(1, 2)

    def theirs(q, k, v, decay, erase, initial_state):
        alpha = -erase[:, ::2] * decay.exp()
        given = (q * K**0.5, k[:, 1::2], v[:, 1::2], alpha, k[:, ::2], decay)
        out, state = call(*map(heads_first, given), initial_state)
        return heads_first(out), state

    leaves = tensors | {"v": v, "erase": e}
    constant = {n: x.requires_grad_() for n, x in leaves.items()}
    ours, expected = linear_memory(**constant, output_final_state=True), theirs(**constant)
    asked = {n: constant[n] for n in ("q", "k", "decay", "initial_state")}
    assert_same([*ours, *grads(ours, asked)], [*expected, *grads(expected, asked)], 1e-12)


@pytest.mark.parametrize("strength", [0.5, 40.0])
def test_fla_gla_and_hgrn2(reference, strength):
    """GLA's function always scales q by K^-1/2. HGRN2 is the same recurrence with k = 1 - exp(g)."""
    call = reference("fla", "ops.gla.naive", "naive_recurrent_gla")

    def theirs(q, k, v, decay, initial_state):
        return call(q * K**0.5, k, v, decay, initial_state, output_final_state=True)

    tensors = make(B, T, H, K, V, decay="channel", delta=False, strength=strength)
    compare(theirs, tensors)
    compare(theirs, {n: x.detach() for n, x in tensors.items()} | {"k": 1 - tensors["decay"].detach().exp()})


def test_fla_delta_net(reference):
    """Heads first, q scaled by K^-1/2."""
    call = reference("fla", "ops.delta_rule.naive", "delta_rule_recurrence")

    def theirs(q, k, v, beta, initial_state):
        out, state = call(*map(heads_first, (q * K**0.5, k, v, beta)), initial_state)
        return heads_first(out), state

    compare(theirs, make(B, T, H, K, V, decay="none"))


def test_fla_retention(reference):
    """Heads first, q scaled by K^-1/2, a decay of log(1 - 2^(-5-h)); no state."""
    call = reference("fla", "ops.retention.naive", "naive_retention")
    tensors = make(B, T, H, K, V, decay="head", delta=False)
    del tensors["initial_state"]
    q, k, v = (tensors[n] for n in "qkv")
    decay = torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float64))))
    theirs = heads_first(call(*map(heads_first, (q * K**0.5, k, v))))
    assert_same([linear_memory(q, k, v, decay)[0]], [theirs], 1e-12)


@pytest.mark.parametrize("function", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_transformers_gated_delta_net(reference, function):
    """Qwen3-Next's functions with use_qk_l2norm_in_kernel=False; q scaled by K^-1/2."""
    call = reference("transformers", "models.qwen3_next.modeling_qwen3_next", function)

    def theirs(q, k, v, decay, beta, initial_state):
        return call(q * K**0.5, k, v, decay, beta, initial_state=initial_state, output_final_state=True)

    compare(theirs, make(B, T, H, K, V))


def test_transformers_mamba2(reference):
    """mamba2_chunk_scan with chunk_size=16, one group, no D: k = B, q = C, v = dt x, decay = dt A. Its state is the
    transpose of ours."""
    call = reference("transformers", "models.mamba2.modeling_mamba2", "mamba2_chunk_scan")
    draw = torch.Generator().manual_seed(0)
    x, dt = torch.randn(B, T, H, V, generator=draw).double(), torch.rand(B, T, H, generator=draw).double()
    k, q = (torch.randn(B, T, 1, K, generator=draw).double() for _ in range(2))
    A, first = -torch.rand(H, generator=draw).double() * 16, torch.randn(B, H, K, V, generator=draw).double()
    leaves = {"x": x, "dt": dt, "k": k, "q": q, "A": A, "first": first}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out, state = call(x, dt, A, k, q, chunk_size=16, initial_states=first.mT, return_final_states=True)
    theirs = [out, state.mT]
    wide = [y.expand(B, T, H, K) for y in (q, k)]
    ours = list(linear_memory(*wide, x * dt.unsqueeze(-1), dt * A, initial_state=first, output_final_state=True))
    assert_same([*ours, *grads(ours, leaves)], [*theirs, *grads(theirs, leaves)], 1e-12)


@pytest.mark.parametrize("gated", [False, True])
def test_the_deep_memory_of_one_layer_is_gated_delta_net(gated):
    """C = 1, L_M = 1, no norm, residual or momentum. The deep memory's loss has no 1/2, and its decay comes after the
    error: theta = a beta / 2, v / a, alpha = 1 - a."""
    tensors = make(B, T, H, K, K, decay="token" if gated else "none", strength=0.5)
    q, k, v, beta, state = (tensors[n] for n in ("q", "k", "v", "beta", "initial_state"))
    a = tensors["decay"].exp() if gated else torch.ones_like(beta)
    weights = (torch.zeros(H, K, K, dtype=q.dtype),)
    start = MemoryState.initial(weights, B)
    start = MemoryState((state,), start.momentum, (state,), start.offset)
    out, end = neural_memory(
        q, k, v / a.unsqueeze(-1), a * beta / 2, torch.zeros_like(a), 1 - a, weights,
        network=NetworkShape(K, K, 1, norm=False, residual=False), chunk_size=1, initial_state=start,
        output_final_state=True,
    )  # fmt: skip
    assert_same(linear_memory(**tensors, output_final_state=True), [out, end.weights[0]], 1e-11)


def test_longhorn_in_matrix_form():
    """arXiv 2407.14207, Eq. 6-9: S_t minimises |S - S_{t-1}|^2 + beta |S^T k - v|^2. This is the delta rule with
    beta / (1 + beta k'k); here it is compared with the minimum itself."""
    tensors = make(1, 5, 1, K, V, decay="none")
    q, v, beta = (tensors[n] for n in ("q", "v", "beta"))
    k, S = 3 * tensors["k"], tensors["initial_state"][0, 0]
    for t in range(5):
        outer = beta[0, t, 0] * torch.outer(k[0, t, 0], k[0, t, 0])
        right = S + beta[0, t, 0] * torch.outer(k[0, t, 0], v[0, t, 0])
        S = torch.linalg.solve(torch.eye(K, dtype=q.dtype) + outer, right)
    step = beta / (1 + beta * k.square().sum(-1))
    _, end = linear_memory(q, k, v, None, step, initial_state=tensors["initial_state"], output_final_state=True)
    assert_same([end[0, 0]], [S], 1e-12)
