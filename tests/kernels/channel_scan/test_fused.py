"""The Triton kernels, interpreted or on a GPU, against the linear memory's definition: outputs, states, gradients."""

import warnings

import pytest
import torch

from tests.kernels.channel_scan import cases
from tests.kernels.channel_scan.cases import compare, compare_cut
from titans_pt.kernels import common
from titans_pt.kernels.channel_scan import channel_scan, dispatch, fused
from titans_pt.kernels.memory.state import state_dtype

pytestmark = pytest.mark.usefixtures("interpreter", "scans_by_rows")
TOLERANCE = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(*shape, **options):
    return {name: x.to(DEVICE) for name, x in cases.make(*shape, **options).items()}


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 8 tokens and programs of a few channels, so that small inputs cross every boundary."""
    monkeypatch.setattr(fused, "TOKENS", 8)
    monkeypatch.setattr(fused, "CELLS", 16)


def check(B, T, D, N, *, mamba, resets=0.0, strength=1.0, seed=0, dtype=torch.float32, tolerance=TOLERANCE):
    tensors = make(B, T, D, N, mamba=mamba, strength=strength, seed=seed, dtype=dtype)
    wide = state_dtype(tensors["x"])
    tensors |= {name: tensors[name].to(wide) for name in ("rate", "initial_state") if name in tensors}
    reset = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < resets if resets else None
    exact = {name: x.double() for name, x in tensors.items()}
    compare(tensors, tolerance, "triton", exact, reset=None if reset is None else reset.to(DEVICE))


@pytest.mark.parametrize("resets", [0.0, 0.2])
@pytest.mark.parametrize("mamba", [True, False])
@pytest.mark.parametrize("T, D", [(1, 1), (8, 4), (19, 6)])
def test_equals_the_definition(small_tiles, T, D, mamba, resets):
    check(2, T, D, 4, mamba=mamba, resets=resets, seed=T)


@pytest.mark.parametrize("mamba", [True, False])
def test_real_tiles(mamba):
    check(1, 70, 20, 16, mamba=mamba, resets=0.05)


def test_long_strong_decays(small_tiles):
    """Log decays of hundreds per token: nothing of the state is left."""
    check(1, 40, 4, 4, mamba=True, strength=40.0)


def test_half_precision(small_tiles):
    check(1, 19, 6, 4, mamba=True, dtype=torch.float16, tolerance=5e-3)


def test_cuts_are_invisible(small_tiles):
    compare_cut(make(2, 21, 4, 4, dtype=torch.float32), [8, 11, 12], 1e-5, 1e-5, backend="triton")


def arguments(**changed):
    tensors = {n: x.requires_grad_() for n, x in make(1, 9, 4, 4, dtype=torch.float32, **changed).items()}
    return *(tensors[n] for n in ("x", "step", "k", "q", "rate")), tensors["initial_state"]


def test_operator_is_well_formed(small_tiles):
    given = *arguments(), torch.zeros(1, 9, dtype=torch.uint8, device=DEVICE), True
    torch.library.opcheck(fused._operator, given, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_takes_it_whole(small_tiles):
    x, step, k, q, rate, _ = arguments()

    def call(x):
        out, state = channel_scan(x, step, k, q, rate, backend="triton", output_final_state=True)
        return out.square().sum() + state.sum()

    plain = torch.autograd.grad(call(x), x)[0]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], plain)


def test_keeps_states_only_for_a_backward_pass(small_tiles, monkeypatch):
    kept = []
    operator = fused._operator
    monkeypatch.setattr(fused, "_operator", lambda *given: kept.append(given[-1]) or operator(*given))
    x, step, k, q, rate, _ = arguments()
    channel_scan(x, step, k, q, rate, backend="triton")
    with torch.no_grad():
        channel_scan(x, step, k, q, rate, backend="triton")
    assert kept == [True, False]


@pytest.mark.parametrize("change, reason", [
    ({"dtype": torch.float64}, "dtype torch.float64 is none"),
    ({"N": 5}, "the state has 5 entries a channel"),
])  # fmt: skip
def test_asked_for_what_it_does_not_serve(change, reason):
    tensors = make(1, 6, 4, **({"N": 4, "dtype": torch.float32} | change))
    with pytest.raises(ValueError, match=f'backend "triton" does not serve this: {reason}'):
        channel_scan(**tensors, backend="triton")


def test_what_falls_back_says_why_once():
    class OnGPU:
        """The attributes of a tensor that the dispatcher reads."""

        device, dtype, shape = torch.device("cuda"), torch.float32, (1, 1, 5)

    common.warned_of.cache_clear()
    with pytest.warns(UserWarning, match="the state has 5 entries a channel"):
        assert dispatch._fused(OnGPU, OnGPU, "auto") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch._fused(OnGPU, OnGPU, "auto") is None


def test_without_contents_it_takes_the_kernels():
    """With meta tensors, a GPU's allocations can be measured on any machine."""
    tensors = {n: x.to("meta").requires_grad_() for n, x in make(2, 100, 8, 16, dtype=torch.float32).items()}
    out, state = channel_scan(**tensors, output_final_state=True)
    assert out.shape == (2, 100, 8) and state.shape == (2, 8, 16)
    (out.sum() + state.sum()).backward()
    assert tensors["rate"].grad.shape == (8, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("mamba", [True, False])
def test_bf16_on_a_gpu(mamba):
    check(2, 1000, 96, 16, mamba=mamba, resets=0.01, dtype=torch.bfloat16, tolerance=2e-2)
