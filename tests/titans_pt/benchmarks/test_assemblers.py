"""Two assemblers for Triton's kernels: choice of the second one, and comparison of test results."""

import pytest

from titans_pt.benchmarks import assemblers

PLAIN = """
tests/a/test_a.py::test_x[T=1, C=2] PASSED                   [ 33%]
tests/a/test_a.py::test_y FAILED [100%]
FAILED tests/a/test_a.py::test_y - assert 1 < 0
"""
WORKERS = """
[gw0] [ 33%] PASSED tests/a/test_a.py::test_y
[gw1] [100%] PASSED tests/a/test_a.py::test_x[T=1, C=2]
[gw1] [100%] SKIPPED tests/a/test_a.py::test_z
"""


def test_which_tests_end_differently(tmp_path, capsys):
    assert assemblers.verdicts(PLAIN) == {
        "tests/a/test_a.py::test_x[T=1, C=2]": "PASSED", "tests/a/test_a.py::test_y": "FAILED"}  # fmt: skip
    logs = [tmp_path / "one", tmp_path / "other"]
    for path, text in zip(logs, (PLAIN, WORKERS), strict=True):
        path.write_text(text)
    assert assemblers.main(list(map(str, logs))) == 1
    assert capsys.readouterr().out == "FAILED -> PASSED: tests/a/test_a.py::test_y\n"
    logs[0].write_text(WORKERS)
    assert assemblers.main(list(map(str, logs))) == 0
    assert capsys.readouterr().out == "2 tests end alike under both assemblers\n"
    logs[0].write_text("cut before the first test ended")
    assert assemblers.main(list(map(str, logs))) == 1


def test_the_second_is_the_newest_of_another_version(assembler, tmp_path):
    paths = [assembler("12.8.93"), assembler("12.9.86"), assembler("13.4.59"), assembler("12.8.93")]
    assert assemblers.second(paths[0], paths) == paths[2]
    assert assemblers.second(paths[0], [paths[0], paths[3], str(tmp_path / "none")]) is None


@pytest.fixture
def used(monkeypatch):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="pip install triton")
    return compiler.get_ptxas(90).path


def test_the_one_in_use_is_told_from_it(used, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_PTXAS_PATH", used)
    monkeypatch.setenv("TITANS_PTXAS", used)
    assert assemblers.main([]) == 1
    assert "no second assembler beside" in capsys.readouterr().err
