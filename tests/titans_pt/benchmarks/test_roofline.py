"""Bytes and FLOPs of the kernels, counted in Triton's interpreter, and the least time of them."""

from collections import Counter

import pytest
import torch

from titans_pt.benchmarks import roofline
from titans_pt.benchmarks.roofline import GPU, Count

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts in Triton's interpreter")


def test_counts_are_those_of_the_kernels(interpreter):
    """The scan moves its state, copies of the state and the weights that keys are multiplied by.

    tests/kernels/memory/fused/test_traffic.py counts these. The scan also moves rows of 64 numbers for each token.
    """
    counts = roofline.count(expansion=1)
    assert set(counts) == {"coefficients", "scan", "read", "read_backward", "scan_backward", "coefficients_backward"}
    scan = counts["scan"]
    size = 2 * 64 * 64
    assert scan.loaded["W"] + scan.stored["W"] == pytest.approx(2 * 4 * size, rel=0.5)  # each block, and the set-up
    weights = size * (
        2 * 2 * 4 + 2 * 2 + 1.5 * 2 * 2
    )  # W and S; their copies; frozen weights and M_0, the outer matrices twice
    # k, v; f, error; hidden and active, there and back; pulled, bent
    tokens = 64 * 64 * (4 * 2 + 2 * 2 + 4 + 6 * 2)
    assert scan.moved == pytest.approx(weights + tokens, rel=0.25)  # the set-up of a group moves one more set
    assert scan.distinct < scan.moved
    assert scan.operations == 7 * 2 * 64**3  # two forward, one back, two writes of two matrices
    assert counts["scan_backward"].moved > 1.5 * scan.moved


def test_bounds_are_the_arithmetic_they_say():
    gpu = GPU("small", flops=1e12, hbm=1e9, l2=2e9, processors=10, clock=1e9, path=64)
    one = Count(Counter(k=6000), Counter(out=400), distinct=1000, operations=1e6)
    read = roofline.bounds("read", one, gpu, length=640, batch=2)
    assert read == pytest.approx({"HBM": 0.24, "L2": 0.768, "L2 to a processor": 2.4e-3, "products": 0.24})
    scan = roofline.bounds("scan", one, gpu, length=640, batch=2)  # 24 rows: three rounds of ten blocks
    assert scan["L2 to a processor"] == pytest.approx(3e-3) and scan["HBM"] == read["HBM"]
    assert roofline.table({"scan": one}, 640, 2).splitlines()[2].startswith("| scan | 2 | 6 | 1 | 1.0 |")
    assert roofline.table({"scan": one}, 640, 2).endswith(" | k 6, out 0 |")
