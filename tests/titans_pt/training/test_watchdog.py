"""A rank that hangs ends the run with a report of where every rank is."""

import pickle
import threading
import time
from types import SimpleNamespace

import pytest

from tests.processes import run, torchrun
from titans_pt.training.watchdog import Watchdog

SCRIPT = """
import ctypes, os, signal, sys, time
from contextlib import nullcontext
from pathlib import Path
import torch, torch.distributed as dist
from titans_pt.training.ranks import process_group
from titans_pt.training.watchdog import Watchdog

def sleep():
    time.sleep(1000)

def block():
    # A lock that is never opened, in C, with Python's own lock held: no thread of Python runs any more.
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)

with process_group() as ranks, Watchdog(ranks, 8.0) as watchdog:
    with watchdog.stacks_in(Path(sys.argv[1])):
        watchdog.at("step 7, micro-batch 0")
        dist.all_reduce(torch.ones(1))
        how = sys.argv[2 + ranks.rank]
        if how == "well":
            watchdog.at("step 7, the sum of the losses")
        else:
            watchdog.at("step 7, reading its samples")
            time.sleep(3)  # time to tell it
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "asleep":
                sleep()
            elif how == "blocked":
                block()
        dist.all_reduce(torch.ones(1))
        print("done", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [str(path), str(tmp_path / "stacks")]


def test_ranks_that_hang_end_the_run_and_every_place_and_stack_is_told(script, tmp_path):
    how = ["stopped", "asleep", "blocked"]
    result = run([*torchrun(1 + len(how)), *script, "well", *how])
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("titans: error: train.timeout")]
    assert "rank 0 has been at step 7, the sum of the losses for" in line
    for rank, name in enumerate(how, 1):
        told = line.partition(f"rank {rank} has been at step 7, reading its samples for")[2].partition(" s")[2]
        assert told.startswith(" and has been silent for") == (name != "asleep")
    assert f"Their stacks are in {tmp_path / 'stacks'}." in line
    stacks = [tmp_path / "stacks" / f"rank-{rank}.txt" for rank in range(1 + len(how))]
    assert "all_reduce" in stacks[0].read_text()
    for path, name in zip(stacks[1:], how, strict=True):
        assert {"stopped": "", "asleep": "in sleep", "blocked": "in block"}[name] in path.read_text()
    recorded = pickle.loads((tmp_path / "stacks" / "collectives-rank-0").read_bytes())
    assert "all_reduce" in recorded["entries"][-1]["profiling_name"]


def test_a_run_that_advances_is_left_alone(script, tmp_path):
    result = run([*torchrun(2), *script, "well", "well"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2
    assert not (tmp_path / "stacks").exists()


@pytest.mark.parametrize(("clock", "hangs"), [("time", False), ("monotonic", True)])
def test_a_clock_that_somebody_sets_ends_no_run(monkeypatch, clock, hangs):
    """An hour passes on one of the two clocks."""
    watchdog, stopped = Watchdog(SimpleNamespace(rank=0, world_size=2), 8.0), threading.Event()
    watchdog._interval = 0.01
    monkeypatch.setattr(watchdog, "_stop", stopped.set)
    monkeypatch.setattr(watchdog, "_end", lambda message: None)
    now = getattr(time, clock)
    monkeypatch.setattr(f"titans_pt.training.watchdog.time.{clock}", lambda: now() + 3600)
    thread = threading.Thread(target=watchdog._look)
    thread.start()
    assert stopped.wait(0.5) == hangs
    watchdog._ended.set()
    thread.join()
