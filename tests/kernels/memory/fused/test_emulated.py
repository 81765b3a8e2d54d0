"""The kernels' PTX for Hopper, emulated on the CPU: tests Triton's code generation, and finds races.

TITANS_PTX_EMULATOR names a program that is not part of this repository. It takes cases as words ("T=20,C=8,initial"),
compiles them for sm_90a and emulates the result. It exits with 0 if outputs, states and gradients agree with the
float64 oracle, without races and accesses outside a tensor.
"""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.kernels.memory.fused.cases import Case

EMULATOR = os.environ.get("TITANS_PTX_EMULATOR")
BF16, FP16 = torch.bfloat16, torch.float16
WORDS = {torch.float32: "fp32", FP16: "fp16", BF16: "bf16"}
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(3600),
    pytest.mark.skipif(EMULATOR is None, reason="TITANS_PTX_EMULATOR names no emulator of PTX"),
]  # fmt: skip


def word(case: Case) -> str:
    """The case's fields that differ from their defaults, as T=20,C=8,initial=True."""
    changed = {f.name: getattr(case, f.name) for f in fields(Case) if getattr(case, f.name) != f.default}
    return ",".join(f"{name}={WORDS.get(value, value)}" for name, value in changed.items())


def emulate(*words: str):
    root = Path(__file__).parents[4]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, EMULATOR, *words], cwd=root, env=environment | {"PYTHONPATH": str(root)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("case", [
    Case(T=40, C=16, D=64, H=1, initial=True, forget_to="start", dtype=FP16),
    Case(T=90, C=64, H=1, initial=True, resets=True, per_layer=True),
    Case(T=60, C=16, H=1, depth=1, norm=False, activation="silu", dtype=BF16),
    Case(T=20, C=8, H=1, initial=True, resets=True, per_layer=True, save_every=1, forget_to="start", dtype=BF16),
    Case(T=9, C=1, H=1, expansion=4, forget_to="start", dtype=FP16),
    Case(T=6, C=1, B=2, H=1, expansion=4, resets=True, per_layer=True),
    Case(T=100, C=64, D=64, H=1, forget_to="start", dtype=BF16),
], ids=word)  # fmt: skip
def test_gradients(case):
    emulate(word(case))


def test_the_order_of_programs_is_nothing_to_the_result():
    emulate("--reverse", word(Case(T=12, C=2, B=2, H=1, expansion=1, initial=True)))


@pytest.mark.parametrize("case", [
    Case(T=7, C=4, D=64, H=1, per_layer=True, initial=True, forget_to="start", decode=True, dtype=BF16),
    Case(T=5, H=1, initial=True, decode=True),
    Case(T=3, C=2, D=128, depth=1, B=2, norm=False, activation="silu", initial=True, decode=True, dtype=FP16),
], ids=word)  # fmt: skip
def test_decoding(case):
    emulate(word(case))
