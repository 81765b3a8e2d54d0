"""Starting training in real processes, under torchrun on the CPU, and reading what they leave."""

import os
import subprocess
import sys
from pathlib import Path

from titans_pt.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def torchrun(processes: int) -> list[str]:
    """The start of a command line."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def forked(processes: int) -> list[str]:
    """The same, for a module's name or a file: without a torchrun, and with one process's imports for all of them."""
    return [sys.executable, "-m", "tests.helpers.forked", str(processes)]


def run(command: list[str], timeout: float = 600) -> subprocess.CompletedProcess:
    """Runs a command to its end; again if torchrun lost the race for a free port."""

    def once():
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)

    result = once()
    return once() if result.returncode and "address already in use" in result.stderr.lower() else result


def run_jobs(processes: int, config: Path, folder: Path, jobs: dict[str, list[str]], timeout: float = 600):
    """Trains ``config`` once for each job, {name of its run folder under ``folder``: overrides}, in one start."""
    words = [word for name, overrides in jobs.items() for word in (f"--{name}", *overrides)]
    result = run([*forked(processes), "tests.helpers.jobs", str(config), str(folder), *words], timeout)
    assert result.returncode == 0, result.stderr[-6000:]


def curve(folder: Path, *keys: str) -> list[tuple]:
    """(step, values of ``keys``) of every logged training step of a run folder."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], *(r[key] for key in keys)) for r in records]
