"""Reactions of our torchrun to processes that end in any way."""

import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE

import pytest
from torch.distributed import TCPStore

from tests.helpers.processes import ENVIRONMENT
from titans_pt.errors import UserError
from titans_pt.training import launcher

LAUNCH = "import sys; from titans_pt.training.launcher import launch; sys.exit(launch(sys.argv[1:]))"

SAVES = """
import signal, sys, time
from pathlib import Path
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
asked = []
signal.alarm(300)  # whatever becomes of the test
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
(folder / "started").touch()
while not asked:
    time.sleep(0.02)
end = time.monotonic() + seconds
while time.monotonic() < end:  # a slow disk
    time.sleep(0.05)
    if len(asked) > 1:
        sys.exit(130)
(folder / "saved").touch()
sys.exit(143)
"""
ENDS = """
import os, signal, sys
from pathlib import Path
with Path(sys.argv[1], "starts").open("a") as file:
    file.write("x")
if sys.argv[2] == "on purpose":
    sys.exit(2)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
os.kill(os.getpid(), signal.SIGKILL)
"""

PROGRESSES = """
import os, signal, sys
from pathlib import Path
from titans_pt.tools.processes import note_progress
starts = Path(sys.argv[1], "starts")
with starts.open("a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
if starts.stat().st_size < 4:  # three of its starts get to a checkpoint
    note_progress()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def run(script: str, *words: str, **variables: str) -> subprocess.Popen:
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, "-c", LAUNCH, str(tmp_path / "script.py"), str(tmp_path), *words]
        ours = {f"TITANS_{name}": value for name, value in ({"PROCESSES": "1", "RESTARTS": "1"} | variables).items()}
        environment = ENVIRONMENT | ours
        started.append(subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def wait_for(path: Path):
    end = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "starts", "status", "says"),
    [("on purpose", 1, 2, []), ("by accident", 2, 137, ["rank 0 was killed by SIGKILL, and no restart"])],
)
def test_what_ended_on_purpose_is_not_started_again(start, tmp_path, how, starts, status, says):
    process = start(ENDS, how)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status
    assert (tmp_path / "starts").read_text() == "x" * starts
    assert "Traceback" not in err
    assert re.findall("^titans: error: (.*) is left", err, re.M) == says


@pytest.mark.thorough
@pytest.mark.parametrize(("restarts", "starts"), [("1", "0123"), ("0", "0")])
def test_a_new_checkpoint_gives_all_restarts_back(start, tmp_path, restarts, starts):
    """Three losses in weeks of training ended it; a process that is lost at the same step each time still ends it."""
    process = start(PROGRESSES, RESTARTS=restarts)
    process.communicate(timeout=200)
    assert process.returncode == 137
    assert (tmp_path / "starts").read_text() == starts


@pytest.mark.thorough
@pytest.mark.parametrize(("grace", "saved"), [("1", False), ("60", True)])
def test_a_stop_waits_for_a_slow_disk_as_long_as_the_grace(start, tmp_path, grace, saved):
    process = start(SAVES, "2.5", GRACE=grace)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert (tmp_path / "saved").exists() == saved
    assert "Traceback" not in err


@pytest.mark.thorough
def test_a_cluster_that_warns_with_sigusr1_gets_a_checkpoint(start, tmp_path):
    process = start(SAVES, "0.5")
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGUSR1
    assert (tmp_path / "saved").exists()
    assert "Traceback" not in err


@pytest.mark.thorough
def test_a_second_interrupt_reaches_the_processes(start, tmp_path):
    process = start(SAVES, "60")
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.thorough
def test_an_interrupt_while_it_waits_for_other_nodes_is_one_line(start, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    process = start(SAVES, "1", NODES="2", MASTER=f"localhost:{port}", HOST="1")
    TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=120))  # waits until the store listens
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "titans: error: interrupted\n")


STACKS = """
import signal, sys, time
from pathlib import Path
from titans_pt.tools.stacks import stacks_to
signal.alarm(300)  # whatever becomes of the test
stacks_to()
Path(sys.argv[1], "started").touch()
while not Path(sys.argv[1], "end").exists():
    time.sleep(0.02)
"""


@pytest.mark.thorough
def test_a_signal_for_stacks_reaches_the_processes_and_ends_none(start, tmp_path):
    process = start(STACKS)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR2)
    time.sleep(1)
    (tmp_path / "end").touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "script.py" in err and "most recent call first" in err


def test_options(monkeypatch):
    monkeypatch.setattr(launcher, "hangs_up", lambda: True)
    found = " ".join(launcher.options({"TITANS_PROCESSES": "4", "TITANS_RESTARTS": "1"}))
    heard = "--signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGQUIT"
    assert found == f"--nproc_per_node 4 --max_restarts 1 {heard} --nnodes 1 --standalone"
    several = {
        "TITANS_PROCESSES": "8",
        "TITANS_NODES": "2",
        "TITANS_MASTER": "n1:29500",
        "TITANS_JOB": "7",
        "TITANS_HOST": "0",
        "TITANS_ADDRESS": "10.0.0.2",
    }
    found = " ".join(launcher.options(several))
    assert found == (
        f"--nproc_per_node 8 --max_restarts 3 {heard} --nnodes 2 --rdzv_backend c10d --rdzv_id 7 "
        "--rdzv_endpoint n1:29500 --rdzv_conf is_host=0 --local_addr 10.0.0.2"
    )


def test_what_other_programs_set_is_not_ours():
    foreign = dict.fromkeys(("PROCESSES", "NODES", "RESTARTS", "GRACE", "HOST", "ADDRESS", "JOB"), "1")
    foreign |= {"MASTER": "n1:29500", "TITANS_NODES": "", "TITANS_GRACE": ""}
    ours = {"TITANS_PROCESSES": "2"}
    assert launcher.options(foreign | ours) == launcher.options(ours)
    assert launcher.grace(foreign) == launcher.GRACE


def test_jobs_on_one_port_have_names_of_their_own():
    several = {"TITANS_PROCESSES": "1", "TITANS_NODES": "2", "TITANS_MASTER": "n1:29500"}
    names = {launcher.options(several, words)[-3] for words in (["a.yaml"], ["b.yaml"], ["a.yaml", "x=1"])}
    assert len(names) == 3
    assert launcher.options(several, ["a.yaml"]) == launcher.options(several, ["a.yaml"])


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        found = launcher.options({"TITANS_PROCESSES": "1"})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found[found.index("--signals_to_handle") + 1] == "SIGTERM,SIGINT,SIGUSR1,SIGQUIT"


@pytest.mark.parametrize(("listens", "message"), [
    ("nobody", None), ("this job", None), ("another job", "another job uses this port, or the nodes of this job were "),
    ("another program", "another program listens on this port; choose a free port of localhost"),
])  # fmt: skip
def test_a_port_of_others_is_refused(monkeypatch, listens, message):
    monkeypatch.setattr(launcher, "MEETING", 1.0)
    with socket.socket() as other:
        other.bind(("localhost", 0))
        variables, port = {"TITANS_NODES": "2", "TITANS_PROCESSES": "1"}, other.getsockname()[1]
        if listens == "another program":
            other.listen()
        elif listens.endswith("job"):
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            words = ["a.yaml" if listens == "this job" else "b.yaml"]
            port = store.port
            name = launcher.options(variables | {"TITANS_MASTER": f"localhost:{port}"}, words)[-3]
            store.compare_set(f"torch.rendezvous.{name}", "", "state")
        variables["TITANS_MASTER"] = f"localhost:{port}"
        with pytest.raises(UserError, match=message) if message else nullcontext():
            launcher.check_master(variables, ["a.yaml"])
        if listens == "another job":  # named jobs may share a port
            launcher.check_master(variables | {"TITANS_JOB": "7"}, ["a.yaml"])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TITANS_PROCESSES": "0"}, "^TITANS_PROCESSES: given '0'; must be a whole number of at least 1$"),
        (
            {"TITANS_PROCESSES": "1", "TITANS_NODES": "0"},
            "^TITANS_NODES: given '0'; must be a whole number of at least 1$",
        ),
        ({}, "TITANS_PROCESSES is not set, and this machine has no GPU"),
        ({"TITANS_PROCESSES": "1", "TITANS_NODES": "2"}, "^TITANS_NODES=2: several nodes need TITANS_MASTER=host:port"),
        ({"TITANS_PROCESSES": "two"}, "TITANS_PROCESSES: given 'two'; must be a whole number of at least 1$"),
        (
            {"TITANS_PROCESSES": "1", "TITANS_NODES": "2", "TITANS_MASTER": "n1"},
            "^TITANS_MASTER: given 'n1'; must be host:port",
        ),
        (
            {"TITANS_PROCESSES": "1", "TITANS_NODES": "2", "TITANS_MASTER": "n1:x"},
            "^TITANS_MASTER: given 'n1:x'; must be host:port",
        ),
        (
            {"TITANS_PROCESSES": "1", "TITANS_NODES": "2", "TITANS_MASTER": "n1:1", "TITANS_HOST": "n1"},
            "TITANS_HOST: given 'n1'; must be 1",
        ),
    ],
)
def test_wrong_variables(variables, message):
    with pytest.raises(UserError, match=message):
        launcher.options(variables)
