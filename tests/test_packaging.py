"""Installed files: one top-level name, complete, with the configs, next to Hugging Face's package kernels."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
FOLDERS = (
    ".ci", ".github", "configs", "data_pipeline", "docs", "examples", "kernels", "launch", "tests", "titans_pt",
)  # fmt: skip


def copy_checkout(folder: Path) -> Path:
    """Copy the checkout without ignored files: setuptools writes into the tree that it builds."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":  # .git is a file in a worktree
            shutil.copy(file, folder)
    return folder


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or an "sdist" like pip, with the installed setuptools and no network."""
    program = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    out.mkdir(exist_ok=True)
    result = subprocess.run([sys.executable, "-c", program, str(out)], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files(folder: Path) -> set[str]:
    """Paths of the files under ``folder``, relative to its parent; links are followed."""
    found = (Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names)
    return {path.relative_to(folder.parent).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", copy_checkout(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Folder of the unpacked sdist."""
    built = build("sdist", copy_checkout(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(built) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's files, as pip lays them out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_installs_titans_pt_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in contents(wheel)}
    version = wheel.name.split("-")[1]
    assert tops == {"titans_pt", f"titans_pt-{version}.dist-info"}
    assert contents(wheel)[f"titans_pt-{version}.dist-info/top_level.txt"].split() == [b"titans_pt"]


def test_the_wheel_has_every_module_and_every_config(wheel):
    packed = {name for name in contents(wheel) if name.startswith("titans_pt/")}
    assert packed == files(ROOT / "titans_pt")
    some = {"kernels/memory/naive.py", "configs/170m/mac.yaml", "launch/slurm_reproduce.sh", "launch/torchrun.sh"}
    assert {f"titans_pt/{name}" for name in some} <= packed


def test_the_sdist_is_the_whole_checkout(sdist):
    assert files(sdist / "titans_pt") == files(ROOT / "titans_pt")
    assert not [path for path in sdist.rglob("*") if path.is_symlink()]
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, and this is none")
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).rstrip("\0").split("\0")
    assert not [name for name in tracked if (ROOT / name).exists() and not (sdist / name).exists()]


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(sdist, wheel, tmp_path):
    ours, theirs = contents(wheel), contents(build("wheel", sdist, tmp_path / "wheel"))
    assert ours == theirs


def test_a_config_and_a_trained_model_are_found_by_their_names_outside_the_checkout(site, tmp_path):
    program = (
        "from titans_pt.config.files import CONFIGS, load_config\n"
        "print(CONFIGS, load_config('configs/170m/mac.yaml').model.d_model)\n"
        "from titans_pt import Titan\n"
        "print(sum(p.numel() for p in Titan.from_pretrained('needles-lmm').parameters()))"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    out = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True)
    assert out == f"{site}/titans_pt/configs 768\n150924\n"


@pytest.mark.parametrize("place", ["the checkout", "elsewhere"])
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_another_package_called_kernels_is_found(site, tmp_path, place, order):
    """This works also from the checkout, where our folder of that name is next to the program."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("get_kernel = 'theirs'")
    paths = [str(site), str(tmp_path)]
    program = "from kernels import get_kernel; import titans_pt.kernels.memory; print(get_kernel)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths if order == "ours first" else paths[::-1])}
    cwd = ROOT if place == "the checkout" else tmp_path
    out = subprocess.check_output([sys.executable, "-c", program], cwd=cwd, env=environment, text=True)
    assert out == "theirs\n"


# A compatible pair: transformers imports kernels only if its version fits.
THEIRS = ["transformers==5.20.2", "kernels==0.17.2"]
TOGETHER = """
from kernels import get_kernel
import titans_pt.kernels.memory, titans_pt.data_pipeline, titans_pt.huggingface, titans_pt.config.files
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

assert is_kernels_available()
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
assert LlamaForCausalLM(LlamaConfig(**sizes))(torch.arange(8)[None]).logits.shape == (1, 8, 32)
print(titans_pt.__file__, titans_pt.config.files.load_config("quickstart").run.dir)
"""
WHOLE = """
import base64, hashlib, importlib.metadata, importlib.util
from kernels import get_kernel

for file in importlib.metadata.files("kernels"):
    if file.hash:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value, file
print(importlib.util.find_spec("titans_pt"))
"""


@pytest.mark.slow(reason="installs Hugging Face's kernels from the package registry: a network, and half a minute each")
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_beside_hugging_faces_kernels(wheel, tmp_path, way, order):
    """Both packages work, from the checkout and elsewhere; theirs is complete after ours is uninstalled."""
    checkout = copy_checkout(tmp_path / "checkout")
    subprocess.check_call([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")])
    python = str(tmp_path / "venv/bin/python")
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    # The new environment also uses the packages installed here, except an editable titans_pt (added by a .pth file).
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib"))

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str, cwd: Path = tmp_path) -> str:
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.splitlines()[-1]

    def pip(*words: str):
        run(sys.executable, "-m", "pip", "--python", python, *words)

    ours = [str(wheel)] if way == "wheel" else ["--no-build-isolation", "--editable", str(checkout)]
    installs = [["--no-deps", "--ignore-installed", *ours], THEIRS]
    for words in installs if order == "ours first" else installs[::-1]:
        pip("install", *words)
    installed = packages if way == "wheel" else checkout
    assert run(python, "-c", TOGETHER) == f"{installed}/titans_pt/__init__.py runs/quickstart"
    assert run(python, "-c", TOGETHER, cwd=checkout) == f"{checkout}/titans_pt/__init__.py runs/quickstart"
    pip("uninstall", "--yes", "titans-pt")
    assert run(python, "-c", WHOLE) == "None"
