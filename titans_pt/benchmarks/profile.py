"""Time of the memory's kernels, one by one: python -m titans_pt.benchmarks.profile FOLDER [--once]

Writes profile.txt (kernels by time) and trace.json (chrome://tracing) to FOLDER, for forward + backward at 32K tokens,
T = 4K. --once: one call and no profiler, to run under ncu.
"""

import argparse
from pathlib import Path

import torch

from titans_pt.benchmarks.kernels import inputs, memory_call
from titans_pt.training.profiling import start_profile


def profile(out: Path, once: bool):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, length, dtype = (8, 4096, torch.bfloat16) if device == "cuda" else (1, 128, torch.float32)
    x = inputs(batch, length, 2, device, dtype)
    run = memory_call("auto", x)

    def both():
        torch.autograd.grad(run().sum(), list(x.values()))

    both()
    if once:
        return
    if device == "cuda":
        torch.cuda.synchronize()
    found = start_profile()
    both()
    if device == "cuda":
        torch.cuda.synchronize()
    found.stop()
    out.mkdir(parents=True, exist_ok=True)
    table = found.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=25, max_name_column_width=60)
    (out / "profile.txt").write_text(table)
    found.export_chrome_trace(str(out / "trace.json"))
    print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    profile(options.out, options.once)
