"""Compiled C in the user's cache folder."""

import ctypes
import shutil

import pytest
import torch

from titans_pt.kernels import native


def test_a_file_that_does_not_load_is_compiled_again(tmp_path, monkeypatch):
    """A power failure may leave an empty file, and a container that shares the folder one that needs its C library."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")

    def compiled(folder):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        return native.library.__wrapped__(source, torch.float32)  # without its memory of earlier answers

    assert compiled(tmp_path / "first").seven() == 7
    (made,) = (tmp_path / "first").rglob("*.so")
    damaged = tmp_path / "second" / made.relative_to(tmp_path / "first")
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    found = compiled(tmp_path / "second")
    assert isinstance(found, ctypes.CDLL) and found.seven() == 7
    assert list(damaged.parent.iterdir()) == [damaged] and damaged.stat().st_size == made.stat().st_size


@pytest.mark.parametrize(("environment", "text", "reason", "told"), [
    ({"PATH": "", "CC": "cc"}, "int a;\n", "no C compiler (cc, gcc) is on the path", None),
    ({}, "no C\n", "cc failed", "does not compile broken.c (PyTorch serves, slower): "),
    ({"XDG_CACHE_HOME": "/dev/null"}, "int a;\n", "/dev/null/", "broken.c is not compiled or loaded (PyTorch "),
])  # fmt: skip
def test_what_keeps_it_from_being_compiled_is_told(environment, text, reason, told, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(native, "warn_once", said.append)
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": "cc"} | environment).items():
        monkeypatch.setenv(name, value)
    if environment.get("PATH") != "" and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "broken.c").write_text(text)
    assert reason in native.library.__wrapped__(tmp_path / "broken.c", torch.float32)
    assert [told in message and "\n" not in message for message in said] == [True] * (told is not None)


def test_a_kernel_without_memory_for_its_work_is_an_error():
    with pytest.raises(MemoryError, match="no memory left for a kernel's work"):
        native.run(lambda *_: 1, 4, 1)
