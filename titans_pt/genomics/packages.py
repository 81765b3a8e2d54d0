"""Files from Debian packages: real genomes without a hub. This project keeps no copies of them.

A package is downloaded once (by pooch, or by apt-get if the mirror cannot be reached directly), compared with its
SHA-256, and read as an archive: neither root nor Debian is needed. The files that were read are in the user's cache.
"""

import gzip
import io
import logging
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from titans_pt.errors import UserError
from titans_pt.tools.cache import cache_folder
from titans_pt.tools.files import check_room

MIRROR = "http://deb.debian.org/debian"
"""Mirror if TITANS_DEBIAN_MIRROR is not set. Packages are compared with their SHA-256."""


@dataclass(frozen=True)
class Package:
    """A .deb file. pool: its folder below ``pool/main``; sha256: hash of the file; licence: licence of its content."""

    name: str
    version: str
    pool: str
    sha256: str
    licence: str
    architecture: str = "all"

    @property
    def file(self) -> str:
        return f"{self.name}_{self.version.partition(':')[2] or self.version}_{self.architecture}.deb"


BOWTIE = Package(
    "bowtie-examples", "1.3.1-1", "b/bowtie", "3cec5c9f6460ea2236cf3d2688665328ab18d90eb2f8eaa0183dd1cd05c212ee",
    "Artistic-2.0",
)  # fmt: skip
CCT = Package(
    "cct-examples", "1:1.0.3-1", "c/cct", "d053d802a9a9bb2e25c7b098a53c3dfc4b7de8ffbc521837f1ec8c398d1cd7d2", "GPL-2+"
)
BSGENOME = Package(
    "r-bioc-bsgenome", "1.66.3-1", "r/r-bioc-bsgenome",
    "9745731c6db19f4c0afc26d655ea0911ebbae92ca924c3ac8d468985de83de59", "Artistic-2.0",
)  # fmt: skip
SMALT = Package(
    "smalt-examples", "0.7.6-12", "s/smalt", "ffb01b7ff91cd29bd45c980cdeea90d986146dd2e907fd9e365d3a8fa75b0751", "GPL-3"
)
MLBENCH = Package(
    "r-cran-mlbench", "2.1-3-1", "r/r-cran-mlbench", "2f1127f7b5e7d08703b13b52ef1976a0c355a7660d6ac575e29b87b13921bc06",
    "GPL-2", "amd64",
)  # fmt: skip


def member(package: Package, path: str) -> Path:
    """The file ``path`` of a package, from the cache; downloaded at the first call.

    Raises:
        UserError: the package cannot be downloaded, or has another hash.
    """
    folder = cache_folder() / f"debian-{package.name}-{package.version.replace(':', '%3a')}"
    kept = folder / PurePosixPath(path).name
    if kept.is_file():
        return kept
    check_room(folder, f"the cache, which gets {package.file}; set XDG_CACHE_HOME to a folder where you may write",
               folder=True)  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        data = _extracted(_download(package, Path(temporary)), path)
        (made := Path(temporary) / kept.name).write_bytes(data)
        os.replace(made, kept)
    return kept


def _download(package: Package, folder: Path) -> Path:
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    mirror = os.environ.get("TITANS_DEBIAN_MIRROR") or MIRROR
    address = f"{mirror.rstrip('/')}/pool/main/{package.pool}/{package.file}"
    try:
        found = pooch.retrieve(address, f"sha256:{package.sha256}", package.file, folder, progressbar=True)
        return Path(found)
    except (requests.RequestException, ValueError) as error:  # ValueError: another hash
        problem = " ".join(str(error).split())[:200]
    if shutil.which("apt-get"):
        words = ["apt-get", "download", "-q", f"{package.name}={package.version}"]
        subprocess.run(words, cwd=folder, capture_output=True, check=False)
        for path in folder.glob(f"{package.name}_*.deb"):
            if pooch.file_hash(str(path)) == package.sha256:
                return path
    raise UserError(
        f"{package.file}: cannot be downloaded ({problem}), nor does apt-get have it; set TITANS_DEBIAN_MIRROR to a "
        f"mirror of Debian that can be reached, such as {MIRROR}"
    )


def _extracted(archive: Path, path: str) -> bytes:
    """The bytes of one file of a .deb, which is an ar archive with a tar archive data.tar.* in it."""
    with archive.open("rb") as file:
        assert file.read(8) == b"!<arch>\n"
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            if name.startswith("data.tar"):
                with tarfile.open(fileobj=io.BytesIO(file.read(size))) as tree:
                    found = tree.extractfile(f"./{path}")
                    assert found is not None
                    return found.read()
            file.seek(size + size % 2, os.SEEK_CUR)
    raise AssertionError(f"{archive} has no data.tar")


def text_of(package: Package, path: str) -> str:
    """A text file of a package, decompressed."""
    data = member(package, path).read_bytes()
    return (gzip.decompress(data) if path.endswith(".gz") else data).decode()
