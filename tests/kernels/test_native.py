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
