"""The SLURM scripts under a real SLURM, on two nodes of one machine (tests/helpers/slurm_cluster.py).

The tests take ten minutes, mostly SLURM's own waiting. They need root, and install Debian's SLURM if it is missing.
"""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, merged
from tests.helpers.processes import ROOT, run
from tests.helpers.slurm_cluster import GRACE, Cluster, why_not
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"),
]  # fmt: skip

SLOW_DISK = """
import os, time
sync, slow = os.fsync, []
def fsync(file):
    if not slow and "/checkpoints/" in os.readlink(f"/proc/self/fd/{file}"):
        slow.append(True)
        time.sleep(float(os.environ["SLOW_DISK"]))
    sync(file)
os.fsync = fsync
"""
"""Module that makes a process's first checkpoint take SLOW_DISK seconds longer."""


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as two_nodes:
        yield two_nodes


class Job:
    """A submitted script, with TINY's settings and ``settings``. It runs in a folder outside the repository."""

    def __init__(self, cluster: Cluster, folder: Path, script: str, *words: str, flags: str = "", **variables: str):
        self.cluster, self.folder = cluster, folder
        variables = {
            "TITANS_PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{folder}",
            "TITANS_PROCESSES": "1",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "between",
        } | variables
        path = str(ROOT / "launch" / script)
        submitted = cluster.run("sbatch", "--parsable", *flags.split(), path, *words, folder=folder, **variables)
        self.number = submitted.strip()

    def __getitem__(self, name: str) -> str:
        return self.cluster.job(self.number)[name]

    @property
    def log(self) -> str:
        (path,) = self.folder.glob(f"titans*-{self['JobId']}.log")
        return path.read_text()

    def wait(self, what: str, condition, seconds: float = 600):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"not {what}: {self.cluster.job(self.number)}\n{self.log[-6000:]}")
            time.sleep(0.5)

    def wait_for(self, state: str):
        self.wait(state, lambda: self["JobState"] == state)

    def hurry(self):
        """Start a requeued job as soon as its earlier processes are gone; SLURM would let it wait two minutes."""
        self.wait_for("PENDING")
        self.cluster.run("scontrol", "update", f"job={self.number}", "StartTime=now")

    def cancel(self):
        self.cluster.run("scancel", self.number)


class Training(Job):
    """A training on both nodes, with one process of one thread on each."""

    def __init__(self, cluster: Cluster, folder: Path, prepared: Path, *words: str, flags: str = "", **variables: str):
        source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
        changes = {"run": {"dir": "run"}, "data": {"dir": str(prepared), "sources": [source]},
                   "train": {"max_steps": 100_000, "checkpoint_every": 100_000}}  # fmt: skip
        (folder / "tiny.yaml").write_text(json.dumps(merged(TINY, changes)))  # JSON is YAML
        flags = f"--nodes 2 {flags}"
        super().__init__(cluster, folder, "slurm_train.sh", "tiny.yaml", *words, flags=flags, **variables)
        self.run = folder / "run"

    @property
    def step(self) -> int:
        return max((record["step"] for record in read_metrics(self.run / "metrics.jsonl")), default=0)

    def wait_for_step(self, step: int):
        self.wait(f"at step {step}", lambda: self.step >= step)

    def wait_for_resume(self):
        """Return the step of the checkpoint from which the requeued job continues."""
        found = re.compile(r"resuming at step (\d+)")
        self.hurry()
        self.wait("resumed", lambda: found.search((self.run / "log.txt").read_text()))
        return int(found.search((self.run / "log.txt").read_text())[1])

    def saved(self) -> int:
        (path,) = checkpoints.list_checkpoints(self.run / "checkpoints")
        assert checkpoints.verify(path) == []
        return checkpoints.step_of(path)


def test_before_its_time_is_up_a_job_saves_and_queues_itself_again_and_scancel_ends_it(cluster, tmp_path, prepared):
    job = Training(cluster, tmp_path, prepared, flags="--time 3 --signal B:USR1@60", TITANS_GRACE="50")
    job.wait("queued again", lambda: job["Restarts"] == "1")
    stopped = job.step
    assert stopped > 0
    assert job.saved() == stopped
    assert "stopped by signal 15" in job.log
    assert "Traceback" not in job.log
    assert job.wait_for_resume() == stopped
    job.wait_for_step(stopped + 3)
    job.cancel()
    job.wait_for("CANCELLED")
    time.sleep(5)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "1")
    steps = [record["step"] for record in read_metrics(job.run / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))


def test_a_preempted_job_saves_on_a_slow_disk_and_queues_itself_again(cluster, tmp_path, prepared):
    (tmp_path / "slow_disk.py").write_text(SLOW_DISK)
    slow = 35  # more than the 30 s that torchrun would leave
    assert slow < GRACE - 10
    job = Training(cluster, tmp_path, prepared, "run.imports=[slow_disk]", SLOW_DISK=str(slow))
    job.wait_for_step(3)
    began = time.monotonic()
    urgent = ["--partition=urgent", "--nodes=2", "--gpus-per-node=8", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", *urgent, folder=tmp_path)
    job.wait("queued again", lambda: job["Restarts"] == "1")
    assert slow < time.monotonic() - began < GRACE
    assert job.saved() == job.step
    assert "Traceback" not in job.log
    assert job.wait_for_resume() == job.saved()
    job.cancel()
    job.wait_for("CANCELLED")


def test_the_loss_of_a_node(cluster, tmp_path, prepared):
    job = Training(cluster, tmp_path, prepared, "train.max_steps=200", "train.checkpoint_every=5")
    job.wait_for_step(12)
    cluster.lose(2)
    job.wait("queued again", lambda: job["Restarts"] == "1")
    cluster.bring(2)
    cluster.wait_for_nodes("idle", "idle")
    assert job.wait_for_resume() >= 10
    job.wait_for("COMPLETED")
    steps = [record["step"] for record in read_metrics(job.run / "metrics.jsonl") if record["kind"] == "train"]
    assert steps == list(range(1, 201))


def test_an_error_of_the_user_ends_the_job_at_once(cluster, tmp_path, prepared):
    job = Training(cluster, tmp_path, prepared, "data.dir=nowhere")
    job.wait_for("FAILED")
    assert job["Restarts"] == "0"
    assert job.log.count("ZeRO 1") == 1  # printed with the plan: one start
    assert job.log.count("titans: error: data.dir=nowhere") in (1, 2)  # once per node, if SLURM does not stop it before
    assert "Traceback" not in job.log


@pytest.mark.parametrize("script", ["slurm_train.sh", "slurm_reproduce.sh"])
def test_a_signal_to_the_steps_alone_queues_the_job_again(cluster, tmp_path, script):
    """As with ``sbatch --signal USR1@S``, without B:."""
    stub, events = tmp_path / "python", tmp_path / "events"
    events.touch()
    stub.write_text(f"""#!/usr/bin/env bash
echo starts >> {events}
trap 'sleep 1; echo saves >> {events}; exit 138' USR1
while :; do sleep 0.2; done
""")
    stub.chmod(0o755)
    job = Job(cluster, tmp_path, script, "c.yaml", flags="--gpus-per-node 1 --cpus-per-task 1", TITANS_PYTHON=str(stub))
    job.wait("at work", lambda: "starts" in events.read_text())
    cluster.run("scancel", "--signal", "USR1", job.number)
    job.wait("queued again", lambda: job["Restarts"] == "1")
    assert events.read_text() == "starts\nsaves\n"
    job.cancel()


@pytest.mark.parametrize("script", ["slurm_train.sh", "slurm_reproduce.sh"])
def test_a_task_of_an_array_that_stops_and_queues_itself_again_leaves_the_others_alone(cluster, tmp_path, script):
    stub, events = tmp_path / "python", tmp_path / "events"
    events.touch()
    stub.write_text(f"""#!/usr/bin/env bash
echo "$SLURM_ARRAY_TASK_ID starts as $SLURM_JOB_ID" >> {events}
trap 'echo "$SLURM_ARRAY_TASK_ID stops" >> {events}; exit 143' TERM
while :; do sleep 0.2; done
""")
    stub.chmod(0o755)
    flags = "--array 0-1 --gpus-per-node 1 --cpus-per-task 1"
    array = Job(cluster, tmp_path, script, "c.yaml", flags=flags, TITANS_PYTHON=str(stub))
    array.wait("at work", lambda: events.read_text().count("starts") == 2)
    # This task has the array's number as its own.
    stopped = re.search(rf"(\d) starts as {array.number}$", events.read_text(), re.M)[1]
    other = f"{array.number}_{1 - int(stopped)}"
    cluster.run("scancel", "--batch", "--signal", "USR1", f"{array.number}_{stopped}")
    array.wait("queued again", lambda: cluster.job(f"{array.number}_{stopped}")["Restarts"] == "1")
    assert events.read_text().count("stops") == 1
    assert (cluster.job(other)["JobState"], cluster.job(other)["Restarts"]) == ("RUNNING", "0")
    array.cancel()


def test_an_array_prepares_and_a_job_after_it_merges(cluster, tmp_path, prepared):
    words = [str(tmp_path / "tiny.yaml"), f"data.dir={tmp_path / 'data'}"]
    source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
    (tmp_path / "tiny.yaml").write_text(json.dumps(merged(TINY, {"data": {"sources": [source]}})))
    array = Job(cluster, tmp_path, "slurm_prepare.sh", *words, flags="--array 0-2")
    merge = Job(cluster, tmp_path, "slurm_prepare.sh", *words, flags=f"--dependency afterok:{array.number}")
    merge.wait_for("COMPLETED")
    assert merge.log.startswith("== no shard")
    logs = [path.read_text() for path in tmp_path.glob("titans-prepare-*.log")]
    assert {log.split(",")[0] for log in logs if log != merge.log} == {f"== shard {n}/3" for n in range(3)}
    for path in prepared.glob("*.bin"):
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes()


def test_an_array_evaluates_and_a_task_that_was_queued_again_does_what_is_left(cluster, tmp_path, tiny):
    config = tiny(run={"dir": str(tmp_path / "run")}, train={"stop_at": 1})
    result = run([sys.executable, "-m", "titans_pt", "train", str(config)])
    assert result.returncode == 0, result.stderr
    settings = ["evaluation.needle.lengths=[600,1200]", "evaluation.needle.samples=3", "evaluation.prefill_tokens=64",
                "evaluation.needle.max_new_tokens=16"]  # fmt: skip
    array = Job(cluster, tmp_path, "slurm_evaluate.sh", "run", "--suite", "needle", *settings, flags="--array 0-1")
    results = tmp_path / "run" / "evaluation" / "step-00000001"

    def done() -> list[int]:
        return [len(path.read_text().splitlines()) for path in sorted(results.glob("needle*.jsonl"))]

    array.number, second = f"{array.number}_0", f"{array.number}_1"
    array.wait("at work", lambda: len(done()) == 2)
    array.number = second
    cluster.run("scontrol", "requeue", second)
    array.wait("queued again", lambda: array["Restarts"] == "1" and array["JobState"] == "PENDING")
    array.hurry()
    array.wait("evaluated", lambda: (results / "summary.json").exists())
    summary = json.loads((results / "summary.json").read_text())
    samples = summary["needle"]["tasks"]["niah_single_1"]["n"]
    assert samples == 2 * 5 * 3
    keys = [json.loads(line) for path in results.glob("needle*.jsonl") for line in path.read_text().splitlines()]
    assert len(keys) == samples
