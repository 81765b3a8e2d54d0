"""The containers' recipes pass the linters, and agree with each other and with the project."""

import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = (ROOT / "launch/Dockerfile").read_text()
APPTAINER = (ROOT / "launch/apptainer.def").read_text()
PROGRAMS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
"""PATH that includes pip's folder of hadolint and shellcheck, whether or not the environment is active."""


def lint(program: str, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([shutil.which(program, path=PROGRAMS), *arguments], capture_output=True, text=True, **options)


def sections() -> dict[str, str]:
    """The sections of the Apptainer definition; "" is its head."""
    parts = re.split(r"^%(\w+)\n", APPTAINER, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_hadolint_finds_nothing():
    done = lint("hadolint", ROOT / "launch/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text(DOCKER.replace("--no-install-recommends", ""))
    done = lint("hadolint", tmp_path / "Dockerfile")
    assert done.returncode == 1 and "DL3015" in done.stdout


def test_the_definition_has_what_apptainer_needs():
    head = dict(re.findall(r"^(\w+): (.+)$", sections()[""], re.M))
    assert head == {"Bootstrap": "docker", "From": "python:3.11-slim-bookworm"}
    assert list(sections()) == ["", "arguments", "files", "post", "runscript", "help"]
    for name, text in sections().items():
        assert not name or all(line.startswith("    ") for line in text.splitlines() if line), name
    given = dict(re.findall(r"^    (\w+)=(\S+)$", sections()["arguments"], re.M))
    assert set(re.findall(r"{{ (\w+) }}", APPTAINER)) == set(given)


@pytest.mark.parametrize("section", ["post", "runscript"])
def test_shellcheck_finds_nothing_in_the_definition(section):
    script = "#!/bin/sh\n" + sections()[section]
    done = lint("shellcheck", "-", input=script)
    assert (done.returncode, done.stdout) == (0, "")


def test_both_install_the_same():
    def commands(text: str) -> list[str]:
        text = re.sub(r"\\\n", " ", text)
        found = re.findall(r"(?:apt-get install|pip install|rm -rf) [^&\n]*", text)
        return [re.sub(r"\$(\w+)|{{ (\w+) }}", r"<\1\2>", " ".join(command.split())) for command in found]

    assert commands(DOCKER) == commands(APPTAINER) and len(commands(DOCKER)) == 4
    assert re.findall(r"^ARG (\S+)$", DOCKER, re.M) == re.findall(r"^    (\w+=\S+)$", APPTAINER, re.M)
    assert re.findall(r"^FROM (\S+)$", DOCKER, re.M) == re.findall(r"^From: (\S+)$", APPTAINER, re.M)


def test_they_install_this_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.search(r"titans-pt\[(.+?)\]'", DOCKER)[1].split(",")) <= set(project["optional-dependencies"])
    assert re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1] == re.search(
        r"^ARG TORCH=(\S+)$", DOCKER, re.M)[1]  # fmt: skip
    oldest = project["requires-python"].removeprefix(">=")
    assert f"python:{oldest}-slim" in DOCKER
