"""Traffic of the forward scan: the interpreted kernel's loads and stores against a count from its source."""

import pytest

from tests.kernels.memory.fused.cases import DEVICE, Case, arguments
from titans_pt.benchmarks.roofline import counting
from titans_pt.kernels.memory import NetworkShape, neural_memory
from titans_pt.kernels.memory.fused.configurations import block_tokens


def scan_bytes(network: NetworkShape, chunk: int, operand: int, to_start: bool) -> dict[str, float]:
    """Bytes per token and head by kind, for a two-layer memory and long sequences without documents.

    state: W and S in fp32, read and written once a block. copies: W and S as operands, written once a block, for keys
    and queries. frozen: the weights to which a chunk's keys are applied; their outer matrix is read twice. This is one
    set where a chunk fills its blocks, and W and S where a block holds several chunks. to_start adds M_0.
    """
    size, outer = sum(a * b for a, b in network.layers), network.hidden * network.width
    block = block_tokens(chunk)
    sets = (2 if chunk < block else 1) + to_start
    return {
        "state": 2 * 2 * 4 * size / block,
        "copies": 2 * operand * size / block,
        "frozen": sets * operand * (size + outer) / min(chunk, block),
    }


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cuda", reason="counts in Triton's interpreter")
@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize("C", [16, 128])
def test_bytes_of_the_scan(C, forget_to):
    case = Case(T=512, C=C, H=1, forget_to=forget_to)
    given, options = arguments(case)
    with counting() as counts:
        neural_memory(*given, **options, backend="triton")
    loaded, stored = counts["scan"].loaded, counts["scan"].stored
    found = {
        "state": loaded["W"] + loaded["S"] + stored["W"] + stored["S"],
        "copies": stored["weights"] + stored["momenta"],
        "frozen": loaded["weights"] + loaded["momenta"] + loaded["begin"],  # in fp32 M_0's operand is M_0, begin
    }
    for kind, count in scan_bytes(NetworkShape(case.D, 2 * case.D), C, 4, forget_to == "start").items():
        # The set-up of a group of blocks moves one more set.
        assert found[kind] / case.T == pytest.approx(count, rel=0.25), kind
