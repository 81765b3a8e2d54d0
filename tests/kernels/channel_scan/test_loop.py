"""The scan in PyTorch against the linear memory's definition, in float64, and against transformers' Mamba."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.channel_scan.cases import compare, compare_cut, make, run
from titans_pt.kernels.channel_scan import channel_scan

TOLERANCE = 1e-9


@settings(max_examples=40)
@given(
    B=st.integers(1, 3), T=st.sampled_from([1, 2, 17, 33]), D=st.sampled_from([1, 3, 8]), N=st.sampled_from([1, 4, 5]),
    mamba=st.booleans(), strength=st.sampled_from([0.01, 1.0, 40.0]), resets=st.sampled_from([0.0, 0.1, 0.7]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_loop_equals_the_linear_memory(B, T, D, N, mamba, strength, resets, seed):
    draw = torch.Generator().manual_seed(seed + 1)
    reset = torch.rand(B, T, generator=draw) < resets if resets else None
    compare(make(B, T, D, N, mamba=mamba, strength=strength, seed=seed), TOLERANCE, "loop", reset=reset)


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 39), max_size=4, unique=True), mamba=st.booleans(), resets=st.booleans())
def test_cuts_are_invisible(cuts, mamba, resets):
    reset = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.1 if resets else None
    compare_cut(make(2, 40, 4, 4, mamba=mamba), cuts, TOLERANCE, reset=reset, backend="loop")


@pytest.mark.filterwarnings("ignore")
def test_transformers_mamba(reference):
    """mamba_selective_scan without D, z, bias and softplus; channels before tokens, A = -rate, initial state 0."""
    call = reference("transformers", "models.mamba.modeling_mamba", "mamba_selective_scan")
    tensors = make(2, 37, 6, 4)
    del tensors["initial_state"]

    def theirs(x, step, k, q, rate):
        out, state = call(x.mT, step.mT, -rate, k.mT, q.mT, return_last_state=True)
        return out.mT, state

    ours = run(channel_scan, tensors, output_final_state=True)
    for mine, expected in zip(ours, run(theirs, tensors), strict=True):
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_longhorn_is_the_minimum_it_is_defined_by():
    """arXiv 2407.14207: h minimises |h - h'|^2 + beta (h k - x)^2 for each channel. Its scan keeps only the diagonal
    of the inverse (I + beta k k')^-1 = I - step k k'. With N = 1 the diagonal is the whole inverse."""
    tensors = make(1, 9, 3, 1, mamba=False)
    beta = torch.rand(1, 9, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tensors["step"] = beta / (1 + beta * tensors["k"].square())
    _, end = channel_scan(**tensors, output_final_state=True)
    h = tensors["initial_state"][0, :, 0]
    for t in range(9):
        b, k = beta[0, t], tensors["k"][0, t]
        h = (h + b * tensors["x"][0, t] * k) / (1 + b * k * k)
    torch.testing.assert_close(end[0, :, 0], h, rtol=0, atol=1e-12)


def test_torch_compile_leaves_the_loop_alone():
    tensors = make(1, 40, 2, 4)
    x = tensors.pop("x").requires_grad_()

    def total(x):
        return channel_scan(x, **tensors)[0].square().sum() * 2

    compiled = torch.compile(total, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(total(x), x))


@pytest.mark.parametrize("change, message", [
    ({"step": torch.zeros(2, 6, 1)}, "x, step must share one shape"),
    ({"k": torch.zeros(2, 6, 5)}, "k, q must share one shape"),
    ({"rate": torch.zeros(4)}, "rate must be"),
    ({"initial_state": torch.zeros(2, 4, 3)}, "initial_state must be"),
    ({"reset": torch.zeros(2, 6)}, "reset must be bool"),
    ({"backend": "fla"}, "backend 'fla' is none of"),
])  # fmt: skip
def test_says_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=f"channel_scan: {message}"):
        channel_scan(**(make(2, 6, 4, 4) | change))


def test_resets_may_be_on_another_device():
    tensors = {name: x.to("meta") for name, x in make(2, 6, 3, 4).items()}
    out, _ = channel_scan(**tensors, reset=torch.zeros(2, 6, dtype=torch.bool), backend="loop")
    assert out.is_meta
