"""Shapes that the kernels serve, and how each is launched: pinned, so that no result depends on a measurement."""

from dataclasses import dataclass

import torch

from titans_pt.kernels.assembler import unsound
from titans_pt.kernels.memory.network import NetworkShape

WIDTHS, EXPANSIONS, DTYPES = (32, 64, 128), (1, 2, 4), (torch.float32, torch.float16, torch.bfloat16)
MAX_BLOCK, TILE = 64, 16
"""Tokens of a compute block, for longer and shorter chunks; least rows of a matrix product."""

UNSOUND = unsound()
"""Reason why no kernel would be right on this machine's GPU; None with a sound assembler, which Triton then uses.
Determined before the first call, because torch.compile cannot trace the search."""

STEP_TOKENS = 8
"""Longest call without a gradient that runs token by token (step.py): a block's set-up would cost more."""


@dataclass(frozen=True)
class Configuration:
    """Launch of a kernel. slice: hidden columns at a time (L = 1 has one slice of D). warps: warps of a program."""

    slice: int
    warps: int


KERNELS = {
    "coefficients": {D: Configuration(0, 8) for D in WIDTHS},
    "coefficients_backward": {D: Configuration(0, 8) for D in WIDTHS},
    "scan": {32: Configuration(32, 4), 64: Configuration(64, 8), 128: Configuration(64, 8)},
    "read": {32: Configuration(32, 4), 64: Configuration(64, 4), 128: Configuration(32, 4)},
    "read_backward": {32: Configuration(16, 4), 64: Configuration(16, 4), 128: Configuration(32, 8)},
    "chunk_gradients": {32: Configuration(32, 4), 64: Configuration(32, 8), 128: Configuration(32, 8)},
    "scan_backward": {32: Configuration(32, 8), 64: Configuration(64, 8), 128: Configuration(32, 8)},
    "step": {32: Configuration(32, 4), 64: Configuration(32, 4), 128: Configuration(32, 8)},
}
"""Launch by kernel and D, for every architecture, chosen for Hopper's registers and shared memory. Reads have many
programs and use 4 warps where possible. With 8 warps, both warpgroups compute the same 64 rows of every product that
another product follows; with 4, a processor holds two programs."""

SHARED = 227 * 1024
"""Bytes of shared memory that one program may have on Hopper."""

NEEDED = {
    (2, 1): {32: 32_768, 64: 65_536, 128: 163_840},
    (2, 2): {32: 61_440, 64: 139_264, 128: 212_992},
    (4, 1): {32: 49_152, 64: 65_536, 128: 196_608},
    (4, 2): {32: 196_608, 64: 376_832, 128: 737_280},
}
"""Bytes of shared memory of the largest program on Hopper, by (bytes of an operand, L) and D: scan_backward, but at
L = 1 and D = 32 the coefficients (fp16, bf16) or read_backward (fp32). Each fp32 operand is three numbers there.
Narrower slices of the hidden layer save little: the large tiles are D x D and block x D. The slow tests compile every
shape and check this table."""


def block_tokens(chunk: int, length: int = MAX_BLOCK) -> int:
    """Tokens of a block in a call of ``length`` tokens: a short call needs no more than its length."""
    if chunk >= MAX_BLOCK:
        return MAX_BLOCK
    return min(MAX_BLOCK, max(TILE, chunk, 1 << (length - 1).bit_length()))


def chunk_tokens(chunk: int, block: int) -> dict[str, int]:
    """STEP: tokens of a chunk inside a block. SUB: rows of the tile that holds these tokens."""
    return {"STEP": min(chunk, block), "SUB": max(TILE, min(chunk, block))}


def precision(dtype: torch.dtype) -> str:
    """Precision of fp32 products. tf32x3: each operand is a sum of tensor cores' 10-bit numbers, accurate as fp32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def scale(dtype: torch.dtype, chunk: int) -> float:
    """Factor of operands that contain a step, see functions.product."""
    return float(1 << (chunk - 1).bit_length()) if dtype == torch.float16 else 1.0


def unsupported(dtype: torch.dtype, network: NetworkShape, chunk: int, shared: int = SHARED) -> str | None:
    """Reason why the kernels cannot serve queries of ``dtype`` with this memory, or None.

    shared: bytes of shared memory that the GPU lets a program have.
    """
    width = network.width
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}"
    if network.depth > 2:
        return f"the memory has {network.depth} layers, not 1 or 2"
    if width not in WIDTHS:
        return f"head width {width} is none of {WIDTHS}"
    if network.depth == 2 and network.hidden not in [e * width for e in EXPANSIONS]:
        return f"hidden width {network.hidden} is not 1, 2 or 4 times the head width {width}"
    if chunk & (chunk - 1) if chunk < MAX_BLOCK else chunk % MAX_BLOCK:
        return f"chunk_size {chunk} is neither a power of two nor a multiple of {MAX_BLOCK}"
    needed = NEEDED[dtype.itemsize, network.depth][width]
    if needed > shared:
        name = str(dtype).removeprefix("torch.")
        less = " (train.precision=bf16 needs less)" if dtype.itemsize == 4 else ""
        return (
            f"{name} at head width {width} and {network.depth} layers needs {needed:,} bytes of shared memory, "
            f"this GPU has {shared:,}{less}"
        )
    return None
