"""A rank that hangs ends the run with a report of where every rank is."""

import json
import pickle
import threading
import time
from types import SimpleNamespace

import pytest

from tests.helpers.processes import run_forked
from titans_pt.training import watchdog as module
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
    return [str(path), str(tmp_path / "stacks")]  # a program for run_forked and its first argument


@pytest.mark.thorough
def test_ranks_that_hang_end_the_run_and_every_place_and_stack_is_told(script, tmp_path):
    how = ["stopped", "asleep", "blocked"]
    result = run_forked(1 + len(how), *script, "well", *how)
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


@pytest.mark.slow  # tests with clocks below check the same in one process
def test_a_run_that_advances_is_left_alone(script, tmp_path):
    result = run_forked(2, *script, "well", "well")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2
    assert not (tmp_path / "stacks").exists()


class Store(dict):
    """The store of a group, without its processes."""

    def add(self, key, amount):
        self[key] = str(int(self.get(key, "0")) + amount)
        return int(self[key])

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key, default=None):
        return super().get(key, default)

    def multi_get(self, keys):
        return [self[key] for key in keys]


@pytest.fixture
def watch(monkeypatch):
    """A watchdog that looks every 10 ms, with a list of the errors with which it would have ended its process."""
    errors, watchdog = [], Watchdog(SimpleNamespace(rank=0, world_size=2), 0.2)
    watchdog._interval, watchdog._store = 0.01, Store()

    def end(message):
        errors.append(message)
        watchdog._ended.set()

    monkeypatch.setattr(watchdog, "_end", end)
    monkeypatch.setattr(module, "ANSWER", 2000)  # a busy machine may pause the thread that asks for much of a second
    thread = threading.Thread(target=watchdog._look)
    thread.start()
    yield watchdog, errors
    watchdog._ended.set()
    thread.join()


def test_a_rank_that_stands_still_ends_the_run(watch):
    watchdog, errors = watch
    watchdog.at("a place")
    assert watchdog._ended.wait(20)
    assert "no progress for 0.2 s" in errors[0] and "the same command continues" in errors[0].lower()


@pytest.mark.parametrize("clock", ["time", "monotonic"])
def test_a_clock_that_jumps_ends_no_run(monkeypatch, watch, clock):
    """Somebody sets the clock, or the process was suspended for an hour and continues."""
    watchdog, errors = watch
    watchdog.timeout = 30.0
    watchdog.at("a place")
    time.sleep(0.1)
    now = getattr(time, clock)
    monkeypatch.setattr(f"titans_pt.training.watchdog.time.{clock}", lambda: now() + 3600)
    time.sleep(0.5)
    assert errors == []


def test_a_rank_that_moves_on_before_the_end_is_left_alone(watch, caplog):
    watchdog, errors = watch
    watchdog._store.set("0", json.dumps(["a place", 1.0, 1.0, None, None]))
    add = watchdog._store.add

    def add_late(*words):
        watchdog.timeout = 30.0
        watchdog.at("the next place")
        return add(*words)

    watchdog._store.add = add_late
    watchdog.at("a place")
    end = time.monotonic() + 20
    while watchdog._store.get("stalled") != "0":
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert errors == []
    assert "rank 0 was at a place for" in caplog.text and "it goes on" in caplog.text


def test_a_rank_waits_while_another_advances(watch):
    """This happens in an evaluation in which one rank has many samples left."""
    watchdog, errors = watch

    def tell(sample):
        watchdog._store.set("1", json.dumps([f"sample {sample}", 0.0, 0.03 * sample, None, None]))
        watchdog._store.set("0", json.dumps(["the samples of other ranks", 0.03 * sample, 0.03 * sample, None, None]))

    tell(0)
    watchdog.at("the samples of other ranks")
    for sample in range(40):
        tell(sample)
        time.sleep(0.03)
    assert errors == []
    watchdog._store.set("0", json.dumps(["the samples of other ranks", 9.0, 9.0, None, None]))  # 1 is silent
    assert watchdog._ended.wait(20)
    assert "rank 1 has been at sample 39" in errors[0]


def test_nothing_is_watched_after_the_end(watch):
    watchdog, errors = watch
    watchdog.at("sending what is left to W&B")
    watchdog.end()
    time.sleep(0.5)
    assert errors == []


def test_a_rank_whose_first_reporter_moved_on_reports_itself(watch):
    watchdog, errors = watch
    ranks, stalled = iter([2, 1]), iter([True, True, False])
    watchdog._store.add = lambda *_: next(ranks)
    watchdog._stalled = lambda: next(stalled)
    watchdog.at("a place")
    assert watchdog._ended.wait(20)
    assert "no progress" in errors[0]


def test_a_rank_ends_silently_after_the_report_of_another(watch):
    watchdog, errors = watch
    watchdog._store.set("stalled", "1")
    watchdog.at("a place")
    assert watchdog._ended.wait(20)
    assert errors == [None]


def test_a_store_that_does_not_answer_keeps_no_rank_from_ending(monkeypatch, watch):
    watchdog, errors = watch
    monkeypatch.setattr(module, "ANSWER", 8)
    silent = threading.Event()
    watchdog._store.add = lambda *_: silent.wait(20)
    watchdog.at("a place")
    assert watchdog._ended.wait(20)
    silent.set()
    assert "does not answer" in errors[0]


class Ranks1024(Store):
    """A store that 1,024 ranks have told their places; it counts what it is asked."""

    asked = 0

    def __init__(self):
        at = dict.fromkeys(range(1024), "step 7, the sum of the losses") | {511: "step 7, reading its samples"}
        super().__init__(
            {str(rank): json.dumps([where, 60.0 + rank % 5, 99.0, None, None]) for rank, where in at.items()}
        )

    def check(self, keys):
        self.asked += 1
        return super().check(keys)

    def multi_get(self, keys):
        self.asked += 1
        return super().multi_get(keys)

    def get(self, key, default=None):
        self.asked += 1
        return super().get(key, default)


def test_a_thousand_ranks_are_asked_at_once_and_reported_by_their_places():
    """With a request for each, a thousand ranks that hang would keep the store from answering any of them in time."""
    watchdog = Watchdog(SimpleNamespace(rank=0, world_size=1024), 30.0)
    watchdog._store = Ranks1024()
    report = watchdog._report()
    assert watchdog._store.asked == 2
    assert (
        "rank 511 has been at step 7, reading its samples for 61 s; "
        "ranks 0-510, 512-1023 have been at step 7, the sum of the losses for 60 to 64 s"
    ) in report
    del watchdog._store["8"], watchdog._store["9"]
    assert "ranks 8-9 never reported their place" in watchdog._report()
