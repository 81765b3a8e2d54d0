"""Files from Debian's packages, without a network: the tests make the archive."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import requests

from titans_pt.errors import UserError
from titans_pt.genomics.packages import BOWTIE, CCT, MIRROR, Package, member
from titans_pt.tools.cache import cache_folder


def deb(files: dict[str, bytes]) -> bytes:
    """An ar archive with the members of a Debian package: format version, control files, files."""
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w:xz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    found = b"!<arch>\n"
    for name, data in {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": tree.getvalue()}.items():
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    return found


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder that stands for Debian's archive, and a package in it."""
    data = deb({"usr/share/a.fa": b">a\nACGT\n"})
    package = Package("some-examples", "2:1.0-1", "s/some", hashlib.sha256(data).hexdigest(), "GPL-3")
    place = tmp_path / "mirror" / "pool" / "main" / "s" / "some"
    place.mkdir(parents=True)
    (place / package.file).write_bytes(data)
    asked = []

    def retrieve(address, known_hash, name, folder, progressbar):
        asked.append(address)
        data = Path(address.removeprefix("file:")).read_bytes()
        if known_hash != f"sha256:{hashlib.sha256(data).hexdigest()}":
            raise ValueError(f"SHA256 hash of {name} does not match")
        (Path(folder) / name).write_bytes(data)
        return str(Path(folder) / name)

    monkeypatch.setattr("pooch.retrieve", retrieve)
    monkeypatch.setenv("TITANS_DEBIAN_MIRROR", f"file:{tmp_path / 'mirror'}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    return package, asked, place / package.file


def test_a_file_is_fetched_once(mirror):
    package, asked, _ = mirror
    path = member(package, "usr/share/a.fa")
    assert path.read_bytes() == b">a\nACGT\n" and member(package, "usr/share/a.fa") == path
    assert len(asked) == 1 and asked[0].endswith("/pool/main/s/some/some-examples_1.0-1_all.deb")
    assert BOWTIE.file == "bowtie-examples_1.3.1-1_all.deb" and CCT.file == "cct-examples_1.0.3-1_all.deb"


def test_another_archive_is_refused_and_nothing_is_left(mirror):
    package, _, archive = mirror
    archive.write_bytes(deb({"usr/share/a.fa": b">a\nTTTT\n"}))
    with pytest.raises(UserError, match="cannot be downloaded .*does not match.* set TITANS_DEBIAN_MIRROR") as error:
        member(package, "usr/share/a.fa")
    assert "\n" not in str(error.value)
    assert not [path for path in cache_folder().rglob("*") if path.is_file()]


def test_an_empty_mirror_counts_as_unset(mirror, monkeypatch):
    package, *_ = mirror
    asked = []

    def retrieve(address, *_, **__):
        asked.append(address)
        raise requests.ConnectionError("offline")

    monkeypatch.setattr("pooch.retrieve", retrieve)
    monkeypatch.setenv("TITANS_DEBIAN_MIRROR", "")
    with pytest.raises(UserError, match="offline"):
        member(package, "usr/share/a.fa")
    assert asked[0].startswith(f"{MIRROR}/pool/main/")
