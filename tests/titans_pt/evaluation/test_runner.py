"""The runner: resumable, divisible over ranks, and clear about what it wrote."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

import titans_pt.evaluation
from tests.helpers.stand_ins import Scripted, copies
from titans_pt import cli
from titans_pt.config import EvaluationConfig
from titans_pt.errors import UserError
from titans_pt.evaluation import evaluate
from titans_pt.evaluation.perplexity import Perplexity
from titans_pt.tasks.language import Language
from titans_pt.tools.sealed import unseal

PICTURES = ("needle.png", "needle-cost.png", "needle-niah_single_1.png", "perplexity_by_position.png")
SMALL = ["evaluation.needle.lengths=[600]", "evaluation.needle.depths=[0, 100]"]


@pytest.fixture
def copying(run):
    run.model = Scripted(copies)
    return run


def single(summary):
    return summary["needle"]["tasks"]["niah_single_1"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
def test_writes_everything_and_says_where(copying, capsys):
    summary = evaluate("anywhere", SMALL)
    out = capsys.readouterr().out
    folder = copying.folder.evaluation / "step-00000007"
    assert unseal((folder / "summary.json").read_text()) == summary
    assert summary["step"] == 7 and summary["checkpoint_hash"] == "c0ffee"
    assert single(summary)["mean"] == 1.0 and single(summary)["n"] == 4
    assert summary["needle"]["settings"]["samples"] == 2
    assert summary["perplexity"]["tokens"] == 200
    assert [len(lines(folder / f"{name}.jsonl")) for name in ("perplexity", "needle")] == [4, 4]
    assert {r["checkpoint_hash"] for r in lines(folder / "needle.jsonl")} == {"c0ffee"}
    files = [folder / "summary.json", folder / "needle.jsonl", folder / "perplexity.jsonl"]
    figures = [copying.folder.plots / name for name in PICTURES]
    for path in files + figures:
        assert path.exists() and str(path) in out
    for path in figures:
        picture = imread(path)
        assert min(picture.shape[:2]) > 300 and len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50
    assert "unigram baseline" in out and "100 [51, 100] 4" in out
    # No other files, and no temporary ones.
    assert len(list(folder.iterdir())) == 3 and len(list(copying.folder.plots.iterdir())) == 4


@pytest.mark.thorough
def test_a_rerun_does_only_what_is_missing(copying, capsys):
    first = evaluate("anywhere", SMALL)
    path = copying.folder.evaluation / "step-00000007" / "needle.jsonl"
    reads = copying.model.reads
    assert evaluate("anywhere", SMALL) == first
    assert copying.model.reads == reads

    # Killed while the last of four lines was written.
    whole = lines(path)
    path.write_bytes(path.read_bytes()[:-20])
    again = evaluate("anywhere", SMALL)
    assert [r["key"] for r in lines(path)] == [r["key"] for r in whole]
    assert 500 < copying.model.reads - reads < 1000  # one sample of 600
    assert single(again)["mean"] == 1.0 and again["perplexity"] == first["perplexity"]

    # A larger grid: the old results are kept, new ones are added.
    wider = evaluate("anywhere", ["evaluation.needle.lengths=[600]", "evaluation.needle.depths=[0, 50, 100]"])
    assert single(wider)["n"] == 6 and len(lines(path)) == 6
    # A smaller grid: the summary covers only the samples asked for.
    assert single(evaluate("anywhere", [*SMALL, "evaluation.needle.samples=1"]))["n"] == 2
    assert len(lines(path)) == 6


def test_another_checkpoint_is_measured_again(copying):
    evaluate("anywhere", SMALL, suite="needle")
    copying.checkpoint_hash, copying.model = "beef", Scripted(lambda text: "7")
    summary = evaluate("anywhere", SMALL, suite="needle")
    assert single(summary)["mean"] == 0.0 and single(summary)["n"] == 4
    assert len(lines(copying.folder.evaluation / "step-00000007" / "needle.jsonl")) == 8


def test_only_one_evaluation_keeps_the_others_summary(copying):
    first = evaluate("anywhere", SMALL, suite="perplexity")
    assert "needle" not in first
    both = evaluate("anywhere", SMALL, suite="needle")
    assert both["perplexity"] == first["perplexity"] and single(both)["n"] == 4
    copying.checkpoint_hash = "beef"
    assert "perplexity" not in evaluate("anywhere", SMALL, suite="needle")


def test_suites_at_the_same_time_lose_no_summary(copying, monkeypatch):
    """The needles end, in another process, while the perplexity's plots are drawn."""
    plots = Perplexity.plots

    def meanwhile(*args):
        evaluate("anywhere", SMALL, suite="needle")
        return plots(*args)

    monkeypatch.setattr(Perplexity, "plots", meanwhile)
    both = evaluate("anywhere", SMALL, suite="perplexity")
    assert both["perplexity"]["tokens"] == 200 and single(both)["n"] == 4


def test_a_damaged_summary_is_told_and_written_again(copying, capsys):
    evaluate("anywhere", SMALL, suite="perplexity")
    path = copying.folder.evaluation / "step-00000007" / "summary.json"
    path.write_bytes(path.read_bytes()[:-20])
    found = evaluate("anywhere", SMALL, suite="needle")
    assert (
        f"{path}: damaged (" in (told := capsys.readouterr().out) and "it is written again, with the suites of" in told
    )
    assert "perplexity" not in found and unseal(path.read_bytes()) == found


def test_ranks_of_a_training_are_silent_and_one_of_them_sums_up(copying, monkeypatch, capsys):
    """Otherwise all of a thousand ranks that end together print the tables and write the plots."""
    monkeypatch.setenv("WORLD_SIZE", "9")
    found = []
    for rank in range(9):
        monkeypatch.setenv("RANK", str(rank))
        assert evaluate("anywhere", SMALL, finish=lambda summary: found.append(summary)) is None
    folder = copying.folder.evaluation / "step-00000007"
    assert capsys.readouterr().out == "" and not (folder / "summary.json").exists()
    assert len(list(folder.glob("needle*.jsonl"))) == 4, "ranks without a sample leave no file"
    assert single(found[0]())["n"] == 4
    assert (folder / "summary.json").exists()


def test_ranks_cover_all_once_and_the_last_one_sums_up(copying, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    folder = copying.folder.evaluation / "step-00000007"
    found = {}
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        found[rank] = evaluate("anywhere", SMALL)
    assert found[2] is None and found[0] is None and single(found[1])["n"] == 4
    assert "other ranks" in capsys.readouterr().out
    for name in ("needle", "perplexity"):
        parts = [lines(folder / part) for part in (f"{name}.jsonl", f"{name}-rank1.jsonl", f"{name}-rank2.jsonl")]
        assert [len(part) for part in parts] == [2, 1, 1]
        assert len({record["key"] for part in parts for record in part}) == 4

    # One process continues from the parts of three.
    reads = copying.model.reads
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert evaluate("anywhere", SMALL) == found[1]
    assert copying.model.reads == reads


def test_says_what_is_wrong(copying):
    with pytest.raises(UserError, match="--suite: given 'needles'; allowed: perplexity, needle"):
        evaluate("anywhere", suite="needles")
    with pytest.raises(UserError, match=r"only evaluation\.KEY=VALUE"):
        evaluate("anywhere", ["model.d_model=8"])
    with pytest.raises(UserError, match=r"evaluation\.needle\.sample: unknown key"):
        evaluate("anywhere", ["evaluation.needle.sample=8"])
    with pytest.raises(UserError, match=r"evaluation\.needle\.lengths: given 100; .* room for the answer"):
        evaluate("anywhere", ["evaluation.needle.lengths=[100]"])
    assert titans_pt.evaluation.__all__ == ["chat", "evaluate", "generate", "generate_batch"]


def test_the_command_names_the_suites(capsys):
    assert cli.run(["evaluate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"for language: {', '.join(Language.suites)} (default: the first two)" in text
    assert list(Language.suites)[:2] == list(Language.usual)
    for suite in Language.suites:
        assert suite in EvaluationConfig.model_fields
