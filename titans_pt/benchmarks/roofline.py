"""Bytes and FLOPs of the memory's kernels, counted while Triton's interpreter runs them, and their lowest cost.

    python -m titans_pt.benchmarks.roofline [--chunk C] [--expansion E] [--length T] [--batch B]

Counts are for one block of 64 tokens of one head (D = 64, bf16's sizes, forgetting to M_0), forward and backward.
Times are lower bounds for a layer of the 170M model (12 heads), each under one limit alone. Nothing is measured.
"""

import argparse
import os
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import normalize

HEADS, WIDTH, BLOCK = 12, 64, 64
SERIAL = ("scan", "scan_backward")
"""Kernels with one program per row, which takes its blocks in order; other kernels have one program per block."""
CALLS = {"coefficients": 2, "scan": 2}
"""Launches of a kernel per training step, if not 1: the backward pass runs coefficients and scan again."""


@dataclass(frozen=True)
class GPU:
    """A GPU's limits: FLOP/s in bf16 and bytes per second as measured on such a GPU, clock in Hz."""

    name: str
    flops: float
    hbm: float
    l2: float = 5.5e12
    processors: int = 132
    clock: float = 1.755e9
    path: int = 64
    """Bytes that one processor takes from L2 per clock cycle."""


GPUS = (GPU("H100", 798e12, 3.0e12), GPU("H200", 788e12, 4.3e12))


@dataclass
class Count:
    """Bytes loaded and stored, by the kernel's argument; bytes of distinct addresses; operations of matrix products."""

    loaded: Counter = field(default_factory=Counter)
    stored: Counter = field(default_factory=Counter)
    distinct: float = 0.0
    operations: float = 0.0

    @property
    def moved(self) -> float:
        return sum(self.loaded.values()) + sum(self.stored.values())

    def divided(self, by: int) -> "Count":
        loaded, stored = (Counter({n: b / by for n, b in part.items()}) for part in (self.loaded, self.stored))
        return Count(loaded, stored, self.distinct / by, self.operations / by)


@contextmanager
def counting():
    """Context that counts every kernel run inside it; yields kernel -> Count of all its programs together."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    found: dict[str, Count] = defaultdict(Count)
    running: list[str] = []
    tensors: list[tuple[str, int, int]] = []  # tensors of the launch: argument, first and last address
    seen: dict[str, list] = defaultdict(list)
    patched = "create_masked_load", "create_masked_store", "create_dot"
    plain = {name: getattr(InterpreterBuilder, name) for name in patched}
    launch = GridExecutor.__call__

    def access(name: str, mask_at: int, part: str):
        def counted(builder, pointers, *rest):
            size = pointers.get_element_ty().primitive_bitwidth // 8
            places = np.atleast_1d(pointers.data)[np.atleast_1d(rest[mask_at].data).astype(bool)]
            if len(places):  # one access stays within one tensor
                argument = next(n for n, begin, end in tensors if begin <= places[0] < end)
                getattr(found[running[-1]], part)[argument] += len(places) * size
            seen[running[-1]].append((np.unique(places), size))
            return plain[name](builder, pointers, *rest)

        return counted

    def dot(builder, a, b, *rest):
        found[running[-1]].operations += 2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return plain["create_dot"](builder, a, b, *rest)

    def call(executor, *given, **named):
        running.append(executor.fn.__name__)
        arguments = zip(executor.arg_names, given, strict=False)
        tensors[:] = [(n, x.data_ptr(), x.data_ptr() + x.nbytes) for n, x in arguments if isinstance(x, torch.Tensor)]
        try:
            return launch(executor, *given, **named)
        finally:
            running.pop()

    InterpreterBuilder.create_masked_load = access("create_masked_load", 0, "loaded")
    InterpreterBuilder.create_masked_store = access("create_masked_store", 1, "stored")
    InterpreterBuilder.create_dot, GridExecutor.__call__ = dot, call
    try:
        yield found
    finally:
        GridExecutor.__call__ = launch
        for name, function in plain.items():
            setattr(InterpreterBuilder, name, function)
        for name, parts in seen.items():
            sizes: Counter = Counter()
            for size in {size for _, size in parts}:
                sizes[size] = len(np.unique(np.concatenate([p for p, s in parts if s == size])))
            found[name].distinct = sum(size * count for size, count in sizes.items())


def count(chunk: int = 64, expansion: int = 4, blocks: int = 2) -> dict[str, Count]:
    """Bytes and FLOPs of each kernel for one block of one head, in a forward and backward pass of ``blocks`` blocks."""
    from titans_pt.kernels.memory import neural_memory

    draw = torch.Generator().manual_seed(0)
    length, hidden = blocks * BLOCK, expansion * WIDTH
    q, k = (normalize(torch.randn(1, length, 1, WIDTH, generator=draw), dim=-1).half() for _ in range(2))
    v = torch.randn(1, length, 1, WIDTH, generator=draw).half()
    theta, eta, alpha = (0.01 * torch.rand(1, length, 1, generator=draw) for _ in range(3))
    weights = tuple(torch.randn(1, a, b, generator=draw) for a, b in ((WIDTH, hidden), (hidden, WIDTH)))
    norm = torch.ones(1, WIDTH), torch.zeros(1, WIDTH)
    leaves = [x.requires_grad_() for x in (q, k, v, theta, eta, alpha, *weights)]
    with counting() as found:
        out, _ = neural_memory(
            q, k, v, theta, eta, alpha, weights, norm=norm, chunk_size=chunk, forget_to="start", backend="triton"
        )
        torch.autograd.grad(out.float().sum(), leaves)
    return {name: total.divided(blocks * CALLS.get(name, 1)) for name, total in found.items()}


def bounds(name: str, one: Count, gpu: GPU, length: int, batch: int) -> dict[str, float]:
    """Milliseconds that one launch in a layer takes at least, under each limit alone.

    HBM: every distinct address is moved once. L2: nothing stays in L1. L2 to a processor: each processor's own path.
    products: matrix products.
    """
    rows, blocks = batch * HEADS, length // BLOCK
    programs = rows if name in SERIAL else rows * blocks
    rounds = -(-programs // gpu.processors) * (blocks if name in SERIAL else 1)  # one program a processor at a time
    total, share = rows * blocks, 1e3 * rounds
    return {
        "HBM": 1e3 * total * one.distinct / gpu.hbm, "L2": 1e3 * total * one.moved / gpu.l2,
        "L2 to a processor": share * one.moved / (gpu.path * gpu.clock),
        "products": share * one.operations / (gpu.flops / gpu.processors),
    }  # fmt: skip


def table(counts: dict[str, Count], length: int, batch: int) -> str:
    """Markdown: counts of a block, the bounds of a layer for each GPU, and the arguments with most bytes."""
    from titans_pt.tools.markdown import markdown_table

    limits = ("HBM", "L2", "L2 to a processor", "products")
    heads = ["kernel", "launches", "KB a block", "distinct KB", "MFLOP"]
    heads += [f"{g.name}: {n}, ms" for g in GPUS for n in limits] + ["most KB"]
    rows = []
    for name, one in counts.items():
        times = [bounds(name, one, gpu, length, batch)[n] for gpu in GPUS for n in limits]
        most = ", ".join(f"{n} {b / 1e3:,.0f}" for n, b in (one.loaded + one.stored).most_common(4))
        moved = (f"{one.moved / 1e3:,.0f}", f"{one.distinct / 1e3:,.0f}", f"{one.operations / 1e6:.1f}")
        rows.append((name, CALLS.get(name, 1), *moved, *(f"{t:.2f}" for t in times), most))
    return markdown_table(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--expansion", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when count imports it
    print(table(count(options.chunk, options.expansion), options.length, options.batch))
