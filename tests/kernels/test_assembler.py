"""The assembler that Triton is given, and the message if none is sound."""

import os

import pytest

from titans_pt.kernels import assembler as assemblers


def test_the_oldest_sound_one_takes_the_place_of_one_that_is_not(assembler, tmp_path):
    old, first, newest = assembler("12.8.93"), assembler("12.9.86"), assembler("13.4.59")
    assert assemblers.version(newest) == (13, 4, 59) and assemblers.version(str(tmp_path)) == ()
    assert assemblers.sound(old, [newest, first, old, str(tmp_path / "none")]) == first
    assert assemblers.sound(newest, [first]) == newest, "a sound one stays"
    assert assemblers.sound(old, [str(tmp_path / "none")]) is None


@pytest.fixture
def triton_with(assembler, monkeypatch):
    """``triton_with(own, *others)``: Triton ships the first version; the others are installed elsewhere."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="pip install triton")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)

    def put(own: str, *others: str) -> list[str]:
        paths = [assembler(version) for version in (own, *others)]
        tool = type("Tool", (), {"path": paths[0], "version": own})
        monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tool)
        monkeypatch.setattr(assemblers, "installed", lambda used: paths)
        return paths

    return put


def test_triton_is_given_a_sound_one(triton_with, monkeypatch):
    # The variable is unset again after the test.
    monkeypatch.setitem(os.environ, "TRITON_PTXAS_PATH", "")
    paths = triton_with("12.8.93", "13.0.88", "12.9.86")
    assert assemblers.choose() is None
    assert os.environ["TRITON_PTXAS_PATH"] == paths[2]


def test_a_sound_one_of_its_own_stays(triton_with):
    triton_with("12.9.86", "13.0.88")
    assert assemblers.choose() is None
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_without_a_sound_one_the_kernels_do_not_serve(triton_with, monkeypatch):
    triton_with("12.8.93", "12.4.1")
    assert assemblers.choose().startswith("the assembler that Triton brings, ptxas 12.8.93, makes wrong code")
    paths = triton_with("12.8.93", "13.0.88")
    monkeypatch.setenv("TRITON_PTXAS_PATH", paths[0])
    assert "that TRITON_PTXAS_PATH names, ptxas 12.8.93" in assemblers.choose()
