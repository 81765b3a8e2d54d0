"""The pinned configurations compile for a Hopper GPU and fit its shared memory. They spill no more registers than the
table SPILLS says, for the versions of Triton that it was measured with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titans_pt.kernels.memory.fused.configurations import KERNELS, NEEDED, SHARED, WIDTHS

pytestmark = pytest.mark.thorough

SPILLS = {
    "3.9": {
        "coefficients": 600, "coefficients_backward": 320, "scan": {32: 0, 64: 0, 128: 300},
        "read": {32: 0, 64: 0, 128: 400}, "read_backward": {32: 200, 64: 600, 128: 1500},
        "scan_backward": {32: 150, 64: 800, 128: 1550}, "chunk_gradients": {32: 300, 64: 0, 128: 450}, "step": 0,
    },
    "3.7": {
        "coefficients": 780, "coefficients_backward": 100, "scan": {64: 60}, "read": {64: 0},
        "read_backward": {64: 520}, "scan_backward": {64: 1300}, "chunk_gradients": {64: 0}, "step": {64: 0},
    },
    "3.6": {
        "coefficients": 520, "coefficients_backward": 100, "scan": {64: 60}, "read": {64: 0},
        "read_backward": {64: 520}, "scan_backward": {64: 1200}, "chunk_gradients": {64: 0}, "step": {64: 0},
    },
}  # fmt: skip
"""Largest allowed spills in bytes per thread, by Triton's version, kernel and D: bf16, L = 2, hidden size 2 D, both
forms of forgetting, all chunks. Each figure is a little above the measured one (docs/notebook.md)."""


def compiled(cases: list[dict]) -> list[dict]:
    words = [sys.executable, str(Path(__file__).with_name("compile_offline.py")), json.dumps(cases)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def allowed(version: str, kernel: str, D: int) -> int | None:
    """Spills that SPILLS allows, in bytes per thread; None if they were not measured."""
    figures = SPILLS.get(".".join(version.split(".")[:2]), {}).get(kernel)
    return figures.get(D) if isinstance(figures, dict) else figures


def check(cases: list[dict]):
    unknown = set()
    for found in compiled(cases):
        assert found["registers"] <= 255 and found["shared"] <= SHARED, found
        limit = allowed(found["triton"], found["kernel"], found.get("D", 64))
        if limit is None:
            unknown.add(f"{found['kernel']} at D = {found.get('D', 64)} under Triton {found['triton']}")
        else:
            assert found["spills"] <= limit, found
    if unknown:
        pytest.skip(f"compiled, but nobody measured the spills of {', '.join(sorted(unknown))}")


def test_spills_are_held_for_versions_that_were_measured():
    assert allowed("3.9.0", "read", 128) == 400 and allowed("3.9.1+git7", "coefficients", 32) == 600
    assert allowed("3.6.0", "read_backward", 64) == 520 and allowed("3.6.0", "read", 128) is None
    assert allowed("3.5.1", "scan", 64) is None and allowed("4.0.0", "step", 64) is None


def test_read_and_step():
    check([{"kernel": "read"}, {"kernel": "read", "forget_to": "start"}, {"kernel": "step"}])


def test_many_chunks_in_a_block():
    check([{"kernel": "scan", "C": 16, "forget_to": "start"}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_activation_is_evaluated_by_one_thread():
    """An evaluation takes two special functions for each value of a block that a thread has: 32 values in the scans,
    64 in the reads.

    The scan evaluates activation and slope; two threads hold the activation. Its backward pass evaluates slope and
    curvature, which share their special functions, and the slope once more. The read evaluates the activation, its
    backward pass also the slope. With chunks of 16 no evaluation is held twice. Up to eight special functions belong
    to LayerNorms. Without functions.once there would be up to eight times as many.
    """
    needed = {("scan", 64): 3 * 64, ("scan_backward", 64): 2 * 64, ("read", 64): 128, ("read_backward", 64): 2 * 128,
              ("scan", 16): 2 * 64, ("scan_backward", 16): 2 * 64}  # fmt: skip
    cases = []
    for kernel, C in needed:
        chunks = [1] if "scan" in kernel else []  # the scans' outer loop, over blocks
        chunks += [64 // C] if C < 64 else []
        cases.append({"kernel": kernel, "C": C, "trips": [*chunks, 128 // KERNELS[kernel][64].slice]})
    found = [case["special functions"] for case in compiled(cases)]
    assert all(n <= count <= n + 8 for n, count in zip(needed.values(), found, strict=True)), found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pinned_configuration(kernel, D, forget_to):
    chunk = 16 if kernel == "chunk_gradients" else 64
    check([{"kernel": kernel, "D": D, "C": chunk, "forget_to": forget_to}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("C", [1, 16, 32])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("kernel", ["scan", "scan_backward", "chunk_gradients"])
def test_every_small_chunk(kernel, D, C):
    check([{"kernel": kernel, "D": D, "C": C, "forget_to": "start"}])


def shapes(D: int, depth: int, dtype: str) -> list[dict]:
    """Shapes that the dispatcher accepts, except shapes that only change the number of loop repetitions.

    The exceptions: chunks of 2 to 8 (compile like 1 and 16), of more than 64 (like 64), and most hidden sizes.
    length: tokens of a short call, whose blocks are smaller.
    """
    own = {"D": D, "depth": depth, "dtype": dtype}
    read = [{"kernel": kernel, "plain": plain} for kernel in ("read", "read_backward") for plain in (False, True)]
    write = [{"kernel": kernel, "C": C} for kernel in ("scan", "scan_backward") for C in (64, 32, 16, 1)]
    write += [{"kernel": "chunk_gradients", "C": C} for C in (32, 16, 1)]
    short = [{"kernel": "scan_backward", "C": C, "length": length} for C, length in ((16, 16), (1, 16), (32, 32))]
    widths = (1, 4) if depth == 2 else ()
    other = [{"kernel": "scan_backward", "C": C, "expansion": width} for C in (64, 16) for width in widths]
    other += [{"kernel": "scan_backward", "C": C, "plain": True} for C in (64, 16)]
    made = [own | s | {"forget_to": f} for s in (*read, *write, *short, *other) for f in ("start", "zero")]
    return [*made, *(own | {"kernel": kernel} for kernel in ("coefficients", "coefficients_backward", "step"))]


def served(shape: dict) -> bool:
    return NEEDED[4 if shape["dtype"] == "fp32" else 2, shape["depth"]][shape["D"]] <= SHARED


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("D", WIDTHS)
def test_every_shape_that_is_served_fits(D, depth, dtype):
    """The table NEEDED bounds the largest need of each width; a width that the table refuses really does not fit."""
    own = shapes(D, depth, dtype)
    if not served(own[0]):
        own = [s for s in own if (s["kernel"], s.get("C")) == ("scan_backward", 16)]
    most = max(found["shared"] for found in compiled([s | {"only": "shared"} for s in own]))
    needed = NEEDED[4 if dtype == "fp32" else 2, depth][D]
    assert most <= needed if served(own[0]) else most > SHARED
    assert most > 0.7 * needed  # the table does not refuse shapes that would fit


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_operands_and_gates_fit(kernel):
    found = compiled([
        {"kernel": kernel, "dtype": "fp32", "D": 32}, {"kernel": kernel, "dtype": "fp16", "C": 16, "gates": 2},
        {"kernel": kernel, "depth": 1}, {"kernel": kernel, "expansion": 4}, {"kernel": kernel, "plain": True},
    ])  # fmt: skip
    assert len(found) == 5
    for one in found:
        assert one["registers"] <= 255 and 0 < one["shared"] <= SHARED or kernel == "step" and not one["shared"], one
