"""Training in real processes, under torchrun on the CPU, and reading their results."""

import json
import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TextIO

import psutil

from titans_pt.runs.metrics import read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def torchrun(processes: int) -> list[str]:
    """First words of a command line that runs torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def run(command: list[str], timeout: float = 600) -> subprocess.CompletedProcess:
    """Run a command to its end; repeat it if torchrun lost the race for a free port."""

    def once():
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)

    result = once()
    return once() if result.returncode and "address already in use" in result.stderr.lower() else result


@cache
def _forks() -> tuple[subprocess.Popen, TextIO]:
    """The process that forks ranks, and its statuses. All tests of this process share it: imports take six seconds."""
    statuses, write = os.pipe()
    words = [sys.executable, "-m", "tests.helpers.forked", str(write)]
    with open(os.devnull, "w") as nowhere:  # DeepSpeed prints during its import
        server = subprocess.Popen(
            words, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, text=True,
            pass_fds=[write],
        )  # fmt: skip
    os.close(write)
    return server, open(statuses)


def run_forked(ranks: int, program: str, *words: str, timeout: float = 600) -> subprocess.CompletedProcess:
    """Run ``program``, a module's name or a file, in ``ranks`` processes, without torchrun and its imports."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = {"ranks": ranks, "program": program, "words": words, "out": str(out), "err": str(err)}
        server, statuses = _forks()
        print(json.dumps(job), file=server.stdin, flush=True)
        if not select.select([statuses], [], [], timeout)[0]:
            for process in [*psutil.Process(server.pid).children(recursive=True), server]:
                process.kill()
            _forks.cache_clear()
            raise subprocess.TimeoutExpired([program, *words], timeout, out.read_text(), err.read_text())
        status = int(statuses.readline())
        return subprocess.CompletedProcess([program, *words], status, out.read_text(), err.read_text())


def run_jobs(processes: int, config: Path, folder: Path, jobs: dict[str, list[str]], timeout: float = 600):
    """Train ``config`` once per job, {name of its run folder under ``folder``: overrides}, in one start."""
    words = [word for name, overrides in jobs.items() for word in (f"--{name}", *overrides)]
    result = run_forked(processes, "tests.helpers.jobs", str(config), str(folder), *words, timeout=timeout)
    assert result.returncode == 0, result.stderr[-6000:]


def curve(folder: Path, *keys: str) -> list[tuple]:
    """Return (step, values of ``keys``) for every logged training step of a run folder."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], *(r[key] for key in keys)) for r in records]
