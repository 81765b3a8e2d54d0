"""The pinned configurations compile for a Hopper GPU and fit its registers, as far as the table says they do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titans_pt.kernels.memory.fused.configurations import KERNELS, WIDTHS

SHARED = 227 * 1024
"""Bytes of shared memory that one program may have on sm_90."""


def compiled(cases: list[dict]) -> list[dict]:
    words = [sys.executable, str(Path(__file__).with_name("compile_offline.py")), json.dumps(cases)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(cases: list[dict]):
    for found in compiled(cases):
        stated = KERNELS[found["kernel"]][found.get("D", 64)].spills
        assert found["spills"] <= stated, found
        assert found["registers"] <= 255 and found["shared"] <= SHARED, found


def test_read_and_step():
    check([{"kernel": "read"}, {"kernel": "read", "forget_to": "start"}, {"kernel": "step"}])


def test_many_chunks_in_a_block():
    check([{"kernel": "scan", "C": 16, "forget_to": "start"}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pinned_configuration(kernel, D, forget_to):
    check([{"kernel": kernel, "D": D, "forget_to": forget_to}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("C", [1, 16, 32])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("kernel", ["scan", "scan_backward"])
def test_every_small_chunk(kernel, D, C):
    check([{"kernel": kernel, "D": D, "C": C, "forget_to": "start"}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_operands_and_blocks_compile(kernel):
    compiled([
        {"kernel": kernel, "dtype": "fp32", "D": 32}, {"kernel": kernel, "dtype": "fp16", "C": 16, "gates": 2},
        {"kernel": kernel, "depth": 1}, {"kernel": kernel, "expansion": 4},
    ])  # fmt: skip
