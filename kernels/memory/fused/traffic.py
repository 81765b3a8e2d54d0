"""What the forward scan moves, counted from its source; tests count what the interpreted kernel moves."""

from titans_pt.kernels.memory.fused.configurations import block_tokens
from titans_pt.kernels.memory.network import NetworkShape


def scan_bytes(network: NetworkShape, chunk: int, operand: int = 2, to_start: bool = True) -> dict[str, float]:
    """Bytes a token and head, of long sequences without documents, by kind.

    Args:
        operand: bytes of a number in the training precision.
        to_start: forgetting leads to M_0, which is then read beside every set of weights.

    Returns:
        state: W and S in fp32, read and written once a block. copies: of both as operands, written once a block, for
        keys and queries. frozen: the weights that the keys of a chunk meet, whose outer matrix is read twice: one set
        where a chunk fills its blocks, W and S where a block holds several chunks.
    """
    size, outer = sum(a * b for a, b in network.layers), network.hidden * network.width if network.depth == 2 else 0
    block = block_tokens(chunk)
    sets = (2 if chunk < block else 1) + to_start
    return {
        "state": 2 * 2 * 4 * size / block,
        "copies": 2 * operand * size / block,
        "frozen": sets * operand * (size + outer) / min(chunk, block),
    }
