"""Ctrl-C while a program imports its modules."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.processes import ENVIRONMENT, ROOT

SLOW = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except BaseException:
    {}
"""
"""A module during whose import Ctrl-C arrives, and which handles the exception."""
IGNORES = SLOW.format("raise ImportError('cannot load module more than once per process')")


def interrupted(folder, module: str, text: str, *words: str) -> subprocess.CompletedProcess:
    """Run a program of ours that finds ``text`` as ``module``."""
    (folder / f"{module}.py").write_text(text)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=60,
        preexec_fn=_heeds_interrupts,
    )  # fmt: skip


def _heeds_interrupts():
    """Shells start background jobs, such as the whole suite, with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("module", "words"), [
    ("click", ("titans_pt", "--version")),
    ("yaml", ("titans_pt", "plan", "quickstart")),
    ("torch", ("titans_pt.training.launcher", "quickstart")),
], ids=["the program", "its command", "the launcher"])  # fmt: skip
@pytest.mark.parametrize("text", [SLOW.format("raise"), IGNORES], ids=["passed on", "made another error"])
def test_an_import_ends_silently(tmp_path, module, words, text):
    found = interrupted(tmp_path, module, text, *words)
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "")


def test_a_process_that_ignores_it_goes_on(tmp_path):
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n")
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from titans_pt.__main__ import main; main()"
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 7
