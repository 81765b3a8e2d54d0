"""What our torchrun does with processes that end, in one way or another."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.processes import ENVIRONMENT
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


@pytest.fixture
def start(tmp_path):
    started = []

    def run(script: str, *words: str, **variables: str) -> subprocess.Popen:
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, "-c", LAUNCH, str(tmp_path / "script.py"), str(tmp_path), *words]
        environment = ENVIRONMENT | {"PROCESSES": "1", "RESTARTS": "1"} | variables
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


@pytest.mark.parametrize(("grace", "saved"), [("1", False), ("60", True)])
def test_a_stop_waits_for_a_slow_disk_as_long_as_the_grace(start, tmp_path, grace, saved):
    process = start(SAVES, "2.5", GRACE=grace)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert (tmp_path / "saved").exists() == saved
    assert "Traceback" not in err


def test_a_second_interrupt_reaches_the_processes(start, tmp_path):
    process = start(SAVES, "60")
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_options():
    found = " ".join(launcher.options({"PROCESSES": "4", "RESTARTS": "1"}))
    assert found == "--nproc_per_node 4 --max_restarts 1 --standalone"
    several = {"PROCESSES": "8", "NODES": "2", "MASTER": "n1:29500", "JOB": "7"}
    found = " ".join(launcher.options(several | {"HOST": "0", "ADDRESS": "10.0.0.2"}))
    assert found == (
        "--nproc_per_node 8 --max_restarts 3 --nnodes 2 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint n1:29500 "
        "--rdzv_conf is_host=0 --local_addr 10.0.0.2"
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PROCESSES": "0"}, "PROCESSES is not set, and this machine has no GPU"),
        ({"PROCESSES": "1", "NODES": "2"}, "NODES=2: several nodes need MASTER=host:port"),
        ({"PROCESSES": "two"}, "PROCESSES: given 'two'; must be a whole number"),
    ],
)
def test_wrong_variables(variables, message):
    with pytest.raises(UserError, match=message):
        launcher.options(variables)
