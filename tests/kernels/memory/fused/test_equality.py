"""The kernels, interpreted or on a GPU, against the definition and the dual form: outputs, states, all gradients."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels.memory.fused.cases import DEVICE, FLOORS, Case, assert_equal, run


@pytest.fixture(
    params=FLOORS if DEVICE == "cuda" else [None],
    ids=lambda dtype: {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, ""),
)
def to_dtype(request):
    """Return the unchanged case in the interpreter, which cannot multiply bf16; on a GPU, the case in each dtype.

    Rounding to half precision switches a ReLU on or off, which no error limit covers. SiLU replaces ReLU there.
    """

    def made(case: Case) -> Case:
        if request.param is None:
            return case
        smooth = {"activation": "silu"} if case.activation == "relu" and request.param != torch.float32 else {}
        return replace(case, dtype=request.param, **smooth)

    return made


@pytest.mark.parametrize("case", [
    pytest.param(Case(T=63, expansion=4, per_layer=True), marks=pytest.mark.slow),
    Case(T=100, depth=1, H=1),
    Case(T=17, depth=1, per_layer=True, norm=False, activation="silu", resets=True, H=1),
    Case(T=40, H=1, forget_to="start", per_layer=True, initial=True, resets=True),
    Case(T=40, forget_to="start", depth=1, extremes=True),
], ids=str)  # fmt: skip
def test_equals_the_definition(case, to_dtype):
    assert_equal(to_dtype(case), oracle="naive")


@pytest.mark.parametrize("case", [
    Case(T=4, C=1, H=1, forget_to="start"),
    pytest.param(
        Case(T=26, C=4, H=1, initial=True, resets=True, save_every=1, per_layer=True, forget_to="start"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(T=70, C=8, H=1, depth=1, initial=True, resets=True, residual=False), marks=pytest.mark.thorough
    ),
    Case(T=130, C=32, H=1, norm=False, activation="silu", extremes=True, initial=True),
    pytest.param(
        Case(T=40, C=16, D=64, H=1, dtype=torch.float16, initial=True, forget_to="start"),
        marks=pytest.mark.slow,
    ),
], ids=str)  # fmt: skip
def test_many_chunks_in_a_block(case, to_dtype):
    assert_equal(to_dtype(case), oracle="naive")


@pytest.mark.parametrize("case", [
    Case(T=130, C=64, expansion=1, norm=False, activation="silu", extremes=True),
    Case(T=130, C=256, H=1, initial=True),
    pytest.param(
        Case(T=70, C=16, H=1, B=2, initial=True, resets=True, save_every=2, activation="relu"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(T=63, C=32, D=64, residual=False, H=1, extremes=True),
        marks=pytest.mark.slow,
    ),
    Case(T=63, C=64, D=128, expansion=1, H=1),
    pytest.param(
        Case(T=130, C=256, H=2, forget_to="start", initial=True),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(T=40, C=16, H=1, B=2, forget_to="start", initial=True, resets=True, save_every=2, activation="relu"),
        marks=pytest.mark.slow,
    ),
], ids=str)  # fmt: skip
def test_equals_the_dual_form(case, to_dtype):
    assert_equal(to_dtype(case))


@pytest.mark.parametrize("case", [
    Case(T=100, C=64, D=64, H=1, dtype=torch.float16, initial=True),
    Case(T=63, C=16, depth=1, D=64, H=1, dtype=torch.float16),
    Case(T=100, C=64, D=64, H=1, dtype=torch.float16, forget_to="start", initial=True),
    Case(T=130, C=256, D=64, expansion=1, H=1, dtype=torch.float16, initial=True),  # steps below fp16's range
], ids=str)  # fmt: skip
def test_half_precision_operands(case):
    assert_equal(case)


EVERYTHING = [
    Case(T=T, C=C, D=D, expansion=expansion, depth=depth, norm=norm, residual=residual, H=1, dtype=dtype, initial=True)
    for (T, C), D, (depth, expansion), norm, residual, dtype in itertools.product(
        [(63, 16), (100, 64), (130, 256)], [32, 64, 128], [(1, 1), (2, 1), (2, 2), (2, 4)], [True, False],
        [True, False], [torch.float32, torch.float16],
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_every_shape(case):
    assert_equal(case)


def test_one_state_for_all_and_one_for_each_block_give_the_same():
    few, many = (run(Case(T=70, H=1, depth=1, save_every=n), "triton") for n in (None, 1))
    for a, b in zip([*few[0], *few[1]], [*many[0], *many[1]], strict=True):
        assert torch.equal(a, b)
