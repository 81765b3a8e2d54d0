"""The scan in C against the linear memory's definition: outputs, final state, every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.channel_scan.cases import compare, compare_cut, make, run
from titans_pt.kernels import native
from titans_pt.kernels.channel_scan import channel_scan
from titans_pt.kernels.channel_scan.native import SOURCE, TILE

if reason := native.unserved(SOURCE, torch.zeros(1)):
    pytest.skip(f"no C: {reason}", allow_module_level=True)


@settings(max_examples=60)
@given(
    B=st.integers(1, 3), T=st.sampled_from([1, 2, TILE, TILE + 1, 2 * TILE + 5]),
    D=st.sampled_from([1, 3, 8, 17, 130, 300]), N=st.sampled_from([1, 4, 5, 16]),
    mamba=st.booleans(), strength=st.sampled_from([0.01, 1.0, 40.0]), resets=st.sampled_from([0.0, 0.1, 0.7]),
    dtype=st.sampled_from([torch.float32, torch.float64]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_it_is_the_linear_memory(B, T, D, N, mamba, strength, resets, dtype, seed):
    draw = torch.Generator().manual_seed(seed + 1)
    reset = torch.rand(B, T, generator=draw) < resets if resets else None
    exact = make(B, T, D, N, mamba=mamba, strength=strength, seed=seed)
    # The oracle reads the rounded inputs: in float32 their rounding is not the scan's error.
    exact = {name: x.to(dtype).double() for name, x in exact.items()}
    tensors = {name: x.to(dtype) for name, x in exact.items()}
    compare(tensors, 1e-10 if dtype == torch.float64 else 2e-5, "native", exact, reset=reset)


def test_auto_is_in_c_and_the_same_without_gradients():
    tensors = make(2, 40, 24, 16, dtype=torch.float32)
    for t in tensors.values():
        t.requires_grad_()
    out, state = channel_scan(**tensors, output_final_state=True)
    assert out.grad_fn.name().startswith("_Scan")
    with torch.no_grad():
        plain, plain_state = channel_scan(**tensors, output_final_state=True)
    assert torch.equal(out, plain) and torch.equal(state, plain_state)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("mamba", [True, False])
def test_cuts_are_invisible(mamba, resets):
    reset = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.1 if resets else None
    compare_cut(make(2, 40, 20, 4, mamba=mamba), [1, 17, 39], 1e-12, reset=reset, backend="native")


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
    tensors, threads = make(3, 20, 300, 4, dtype=torch.float32), torch.get_num_threads()
    one = run(channel_scan, tensors, backend="native", output_final_state=True)
    try:
        torch.set_num_threads(3)
        several = run(channel_scan, tensors, backend="native", output_final_state=True)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(one, several, strict=True):
        assert all(map(torch.equal, a, b))


def test_says_what_it_does_not_serve(monkeypatch):
    tensors = make(1, 3, 2, 4)
    monkeypatch.setattr(native, "unserved", lambda *_: "not here")
    with pytest.raises(ValueError, match='backend "native" does not serve this: not here; use "auto" or "loop"'):
        channel_scan(**tensors, backend="native")
    channel_scan(**tensors)
