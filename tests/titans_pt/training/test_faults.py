"""Faults of a run of two ranks: something is killed, hangs, or fills up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from tests.helpers.processes import ENVIRONMENT, ROOT, curve, run, run_forked, run_jobs, torchrun
from titans_pt.config.files import load_config
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # starting processes is slow on a busy machine


def start(config: Path, *overrides: str) -> subprocess.Popen:
    command = [*torchrun(2), "-m", "titans_pt", "train", str(config), *overrides]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=PIPE, stderr=PIPE, text=True)


def ranks_of(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """The training processes of a torchrun, by rank."""
    children = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def wait_for(process: subprocess.Popen, condition, what: str, timeout: float = 200):
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end or process.poll() is not None:
            process.kill()
            pytest.fail(f"not {what}: {process.communicate(timeout=20)}")
        time.sleep(0.05)


def wait_for_step(folder: Path, process: subprocess.Popen, step: int):
    wait_for(process, lambda: any(r["step"] >= step for r in read_metrics(folder / "metrics.jsonl")), f"at step {step}")


def test_sigterm_on_one_rank_stops_all_with_a_checkpoint(tiny, tmp_path):
    folder, process = tmp_path / "run", start(tiny(train={"max_steps": 100_000}), "parallel.tensor=2")
    wait_for_step(folder, process, 3)
    ranks_of(process)[1].send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30  # torchrun's own grace period
    (saved,) = checkpoints.list_checkpoints(folder / "checkpoints")
    assert checkpoints.verify(saved) == []
    assert "stopped by signal 15" in (folder / "log.txt").read_text()


def test_killed_ranks_are_restarted_and_the_curve_is_as_if_undisturbed(tiny, tmp_path):
    """Twice with one restart, because there are new checkpoints in between."""
    config = tiny(train={"max_steps": 22, "checkpoint_every": 3})
    launcher = [str(ROOT / "launch" / "torchrun.sh"), str(config)]
    environment = ENVIRONMENT | {"TITANS_PROCESSES": "2", "TITANS_RESTARTS": "1", "TITANS_PYTHON": sys.executable}
    process = subprocess.Popen(launcher, env=environment, stdout=PIPE, stderr=PIPE, text=True)
    for step in (5, 13):
        wait_for_step(tmp_path / "run", process, step)
        ranks_of(process)[1].kill()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("starting at step 0") == 1
    assert log.count("resuming at step") == 2

    result = run_forked(2, "titans_pt", "train", str(config), f"run.dir={tmp_path / 'calm'}")
    assert result.returncode == 0, result.stderr[-3000:]
    keys = ("loss", "grad_norm", "lr")
    assert curve(tmp_path / "run", *keys) == curve(tmp_path / "calm", *keys)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_the_last_checkpoint_stands(tiny, small_disk):
    config = tiny(train={"max_steps": 50, "checkpoint_every": 1, "keep_last": 50})
    command = [sys.executable, "-m", "titans_pt", "train", str(config), f"run.dir={small_disk / 'run'}"]
    result = run(command)
    assert result.returncode == 2
    assert f"titans: error: {small_disk}/run/checkpoints/.step-" in result.stderr
    assert "No space left on device; free some space" in result.stderr
    found = checkpoints.list_checkpoints(small_disk / "run" / "checkpoints")
    assert found
    assert all(checkpoints.verify(path) == [] for path in found)
    for path in found[:-1]:
        checkpoints.shutil.rmtree(path)
    result = run([*command, "train.keep_last=1", f"train.stop_at={checkpoints.step_of(found[-1]) + 1}"])
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_truncated_checkpoint_is_passed_over_by_all_ranks(tiny, tmp_path):
    config = tiny(train={"checkpoint_every": 2}, run={"dir": str(tmp_path / "jobs" / "run")})
    run_jobs(2, config, tmp_path / "jobs", {"run@1": ["train.stop_at=4"]})
    newest = tmp_path / "jobs" / "run" / "checkpoints" / "step-00000004" / checkpoints.OPTIMIZER
    os.truncate(newest, newest.stat().st_size // 2)
    run_jobs(2, config, tmp_path / "jobs", {"run@2": ["parallel.tensor=2"], "whole": []})
    assert "resuming at step 2" in (tmp_path / "jobs" / "run" / "log.txt").read_text()
    got, expected = (curve(tmp_path / "jobs" / name, "loss") for name in ("run", "whole"))
    assert [x[0] for x in got] == list(range(1, load_config(config).train.max_steps + 1))
    assert [x[1] for x in got] == pytest.approx([x[1] for x in expected], abs=1e-4)
