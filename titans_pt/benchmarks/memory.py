"""The memory layer on this machine: time and memory against titans-pytorch, and against the length.

Every case runs in a separate process, which has its own peak memory. The cases take turns: a machine that slows down
slows all of them, and the ratios stay right.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from titans_pt.benchmarks.process import memory_mib, write_about, write_csv
from titans_pt.config import MemoryConfig
from titans_pt.layers.memory import NeuralMemory

WIDTH, HEADS, CHUNK = 256, 4, 16
"""B = 1, four heads of 64, C = 16, L_M = 2, expansion 4, fp32: the size in other projects' issues."""


@dataclass
class Measurement:
    """seconds: median over repeats, forward and backward. memory_mib: peak memory of the process above its start."""

    case: str
    tokens: int
    forward_seconds: float
    backward_seconds: float
    memory_mib: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def microseconds_per_token(self) -> float:
        return 1e6 * self.seconds / self.tokens


def benchmark_memory(out: Path, rounds: int = 3, longest: int = 65_536):
    """Time the cases, print tables, and write ``out``/memory.csv and ``out``/memory.json (versions and hardware)."""
    out.mkdir(parents=True, exist_ok=True)
    cases = ["titans_pt"] + (["titans-pytorch"] if find_spec("titans_pytorch") else [])
    runs = [{case: _in_a_process(case, 1024) for case in cases} for _ in range(rounds)]
    best = {case: _median([found[case] for found in runs]) for case in cases}
    lengths = [n for n in (1024, 4096, 16_384, 65_536) if n <= longest]
    training = [_in_a_process("titans_pt", n) for n in lengths]
    streaming = [_in_a_process("stream", n) for n in lengths]

    print(
        f"memory layer, B=1, {HEADS} heads of {WIDTH // HEADS}, C={CHUNK}, L_M=2, expansion 4, fp32, "
        f"{torch.get_num_threads()} threads, median of {rounds} processes"
    )
    _table(best.values())
    if len(best) == 2:
        ours, other = best.values()
        print(
            f"titans-pytorch / titans_pt: time {other.seconds / ours.seconds:.1f}, "
            f"memory {other.memory_mib / ours.memory_mib:.1f}"
        )
    else:
        print("titans-pytorch is not installed (pip install titans-pytorch==0.5.5): no comparison")
    print("\nforward + backward of one call, by length")
    _table(training)
    print("\nstreaming in pieces of 1024 tokens, state carried (forward only)")
    _table(streaming)

    everything = [*best.values(), *training, *streaming]
    write_csv(out / "memory.csv", everything)
    write_about(out / "memory.json")
    print(f"\n{out / 'memory.csv'}")


def _table(rows):
    print(f"{'case':>16}{'tokens':>9}{'forward s':>11}{'backward s':>12}{'us/token':>10}{'MiB':>8}")
    for m in rows:
        print(
            f"{m.case:>16}{m.tokens:>9}{m.forward_seconds:>11.3f}{m.backward_seconds:>12.3f}"
            f"{m.microseconds_per_token:>10.1f}{m.memory_mib:>8.0f}"
        )


def _median(runs: list[Measurement]) -> Measurement:
    return sorted(runs, key=lambda m: m.seconds)[len(runs) // 2]


def _in_a_process(case: str, tokens: int) -> Measurement:
    """Measures a case in a fresh process with as many threads as this one."""
    words = [sys.executable, "-m", "titans_pt.benchmarks.memory", case, str(tokens), str(torch.get_num_threads())]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmark case {case}: {done.stderr[-2000:]}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _build(case: str):
    torch.manual_seed(0)
    if case == "titans-pytorch":
        from titans_pytorch import MemoryMLP
        from titans_pytorch import NeuralMemory as Other

        mlp = MemoryMLP(WIDTH // HEADS, depth=2, expansion_factor=4.0)
        return Other(dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, chunk_size=CHUNK, batch_size=CHUNK, model=mlp)
    return NeuralMemory(WIDTH, HEADS, 4, MemoryConfig(chunk_size=CHUNK, depth=2, expansion=4), 1e-5)


def measure(case: str, tokens: int) -> Measurement:
    """case: titans_pt, titans-pytorch (forward and backward of one call) or stream (forward, in pieces)."""
    layer = _build(case)
    x = torch.randn(1, tokens, WIDTH)
    start = memory_mib("VmRSS")
    repeats = max(1, min(6, 6 * 1024 // tokens))
    forward, backward = [], []
    for n in range(repeats + (1 if tokens <= 4096 else 0)):
        began = time.perf_counter()
        if case == "stream":
            with torch.no_grad():
                state = None
                for piece in x.split(1024, 1):
                    _, state = layer(piece, state)
            between = time.perf_counter()
        else:
            y, _ = layer(x)
            between = time.perf_counter()
            y.square().mean().backward()
        if n or tokens > 4096:  # the first short repeat warms up
            forward.append(between - began)
            backward.append(time.perf_counter() - between)
    peak = memory_mib("VmHWM") - start
    return Measurement(case, tokens, statistics.median(forward), statistics.median(backward), peak)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))
