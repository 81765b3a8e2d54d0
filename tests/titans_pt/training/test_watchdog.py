"""A rank that hangs ends the run with a report of where every rank is."""

import pytest

from tests.processes import run, torchrun

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from titans_pt.training.ranks import process_group
from titans_pt.training.watchdog import Watchdog

with process_group() as ranks, Watchdog(ranks, 8.0) as watchdog:
    watchdog.at("step 7, micro-batch 0")
    dist.all_reduce(torch.ones(1))
    if ranks.rank == 1:
        watchdog.at("step 7, reading its samples")
        if sys.argv[1] == "stopped":
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif sys.argv[1] == "asleep":
            time.sleep(1000)
    else:
        watchdog.at("step 7, the sum of the losses")
    dist.all_reduce(torch.ones(1))
    print("done", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(("how", "silent"), [("stopped", True), ("asleep", False)])
def test_a_rank_that_hangs_ends_the_run_and_every_place_is_told(script, how, silent):
    result = run([*torchrun(2), script, how])
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("titans: error: train.timeout")]
    assert "rank 0 has been at step 7, the sum of the losses for" in line
    assert "rank 1 has been at step 7, reading its samples for" in line
    assert ("silent for" in line.partition("rank 1")[2].partition("(")[0]) == silent


def test_a_run_that_advances_is_left_alone(script):
    result = run([*torchrun(2), script, "well"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2
