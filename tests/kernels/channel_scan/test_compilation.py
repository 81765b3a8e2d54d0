"""The kernels compile for a Hopper GPU and fit its registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

SHARED = 227 * 1024
"""Largest shared memory of one program on sm_90, in bytes."""


OLDER = {"3.6": 4, "3.7": 4}
"""Bytes per thread that these versions of Triton spill where 3.9 spills none; other versions were not measured."""


def check(cases: list[dict], spills: int = 0):
    pytest.importorskip("triton", reason="pip install triton")
    words = [sys.executable, str(Path(__file__).with_name("compile_offline.py")), json.dumps(cases)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    unknown = set()
    for found in map(json.loads, done.stdout.splitlines()):
        assert found["registers"] <= 255 and found["shared"] <= SHARED, found
        version = ".".join(found["triton"].split(".")[:2])
        if version not in ("3.9", *OLDER):
            unknown.add(version)
            continue
        assert found["spills"] <= spills + OLDER.get(version, 0), found
    if unknown:
        pytest.skip(f"compiled, but nobody measured the spills under Triton {', '.join(unknown)}")


def test_mamba_backward():
    check([{"kernel": "scan_backward", "reset": True}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_others():
    """Longhorn's backward pass with documents spills 44 bytes per thread."""
    check([{"kernel": "scan", "reset": True}, {"kernel": "scan", "mamba": False}, {"kernel": "scan_backward"}])
    check([{"kernel": "scan_backward", "mamba": False}])
    check([{"kernel": "scan_backward", "mamba": False, "reset": True}], spills=64)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("N, dtype", [(4, "fp32"), (8, "fp16"), (32, "bf16"), (64, "fp32"), (128, "bf16")])
def test_other_states_and_precisions_compile(N, dtype):
    check([{"kernel": "scan", "N": N, "dtype": dtype}, {"kernel": "scan_backward", "N": N, "dtype": dtype}], spills=400)
