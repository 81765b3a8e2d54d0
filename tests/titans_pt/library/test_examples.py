"""Small runs of the scripts in examples/ give the results that the scripts promise."""

import runpy
import shutil
from pathlib import Path

import pytest

from tests.helpers.untrained import untrained_run
from titans_pt.huggingface import export_run

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LENGTH = 80
"""Largest number of lines of an example."""


def run(name: str, *words, **more):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](*words, **more)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory, prepared):
    return untrained_run(tmp_path_factory.mktemp("run") / "run", prepared)


def test_they_are_short_and_the_page_points_to_them():
    page = (ROOT / "docs/python.md").read_text()
    assert len(EXAMPLES) == 3
    for script in EXAMPLES:
        assert len(script.read_text().splitlines()) <= LENGTH and f"../examples/{script.name}" in page


def test_a_memory_in_a_model(capsys):
    run("memory_in_a_model", 3)
    assert "step 3: loss" in (shown := capsys.readouterr().out) and "(chance 12 %)" in shown


@pytest.mark.slow(reason="half a minute of training")
def test_a_memory_in_a_model_learns():
    assert run("memory_in_a_model", 400) > 0.5


def test_a_document_is_streamed_and_asked_later(quickstart, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("document.txt").write_text("abc dea fonk " * 50)
    answer = run("stream_and_ask", str(quickstart), "document.txt", "What is it?")
    assert "document.txt is read" in capsys.readouterr().out and Path("document.safetensors").is_file()
    shutil.copy("document.txt", "other.txt")
    assert run("stream_and_ask", str(quickstart), "other.txt", "What is it?") == answer


@pytest.mark.slow(reason="imports transformers' Trainer, which takes seconds")
def test_the_trainer_fine_tunes(quickstart, tmp_path):
    exported = export_run(quickstart, tmp_path / "exported")
    (tmp_path / "text.txt").write_text("abc dea fonk " * 200)
    words = [str(exported), str(tmp_path / "text.txt"), str(tmp_path / "out")]
    losses = run("finetune_with_trainer", *words, steps=6, length=32)
    assert losses[-1] < losses[0] and (tmp_path / "out/model.safetensors").is_file()
