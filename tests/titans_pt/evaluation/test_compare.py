"""Several runs' accuracies in one picture."""

import json

import pytest
from matplotlib.image import imread

from titans_pt import cli
from titans_pt.errors import UserError
from titans_pt.evaluation.compare import compare
from titans_pt.tools.sealed import seal


def results(folder, step, accuracy):
    rows = [{"length": n, "mean": accuracy, "low": 0.0, "high": 1.0, "n": 4} for n in (1024, 2048)]
    path = folder / f"evaluation/step-{step:08d}/summary.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"step": step, "needle": {"tasks": {"niah_single_1": {"by_length": rows}}}}))
    return folder


def test_newest_results_of_each_run(tmp_path, capsys):
    a, b = results(tmp_path / "a", 3, 0.25), results(tmp_path / "b", 7, 1.0)
    results(tmp_path / "a", 12, 0.5)
    (tmp_path / "a/evaluation/step-00000020").mkdir()
    assert cli.run(["compare", str(a), str(b), "--out", str(tmp_path / "c.png")]) == 0
    out = capsys.readouterr().out
    assert "step 12" in out and " 50.00 %" in out and "100.00 %" in out and str(tmp_path / "c.png") in out
    assert imread(tmp_path / "c.png").std() > 0.05
    compare([a, b, str(a)], "niah_single_1", tmp_path / "c.png")
    assert capsys.readouterr().out.count("step 12") == 1  # named twice, drawn once
    compare([a], "niah_single_1", tmp_path / "c.png", step=3)
    assert " 25.00 %" in capsys.readouterr().out


def test_the_format_is_the_names(tmp_path, capsys):
    run = str(results(tmp_path / "a", 3, 0.25))
    for name, begin in (("c.pdf", b"%PDF"), ("c.svg", b"<?xml"), ("c.PNG", b"\x89PNG")):
        assert cli.run(["compare", run, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    capsys.readouterr()
    for name in ("c.docx", "c"):
        assert cli.run(["compare", str(tmp_path / "no-run"), "--out", str(tmp_path / name)]) == 2
        assert "no figure can be written as" in capsys.readouterr().err
        assert not (tmp_path / name).exists()


def test_a_damaged_summary_is_one_line(tmp_path):
    folder = results(tmp_path / "a", 3, 0.25)
    path = folder / "evaluation/step-00000003/summary.json"
    whole = json.loads(path.read_text())
    sealed = json.dumps(seal(whole))
    for text in (
        '{"step": 3, "nee',
        "[]",
        b"\xff",
        bytes(50),
        json.dumps(whole).replace("mean", "meaN"),
        json.dumps(whole).replace("by_length", "by_lengtH"),
        sealed.replace('"step": 3', '"step": 8'),
        sealed[1:],
    ):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=r"summary.json: damaged .*; make it again with: titans evaluate"):
            compare([folder], task_of(whole), tmp_path / "c.png")
    path.write_text(sealed)
    compare([folder], task_of(whole), tmp_path / "c.png")


def task_of(summary):
    """Return the first task in a summary."""
    return next(iter(next(summary[suite] for suite in ("needle", "babilong") if suite in summary)["tasks"]))


def test_without_results(tmp_path):
    with pytest.raises(
        UserError,
        match=r"holds no results of qa1; make them with: titans evaluate RUN --out .* "
        r"--suite babilong 'evaluation.babilong.tasks=\[qa1\]'$",
    ):
        compare([results(tmp_path / "a", 3, 0.25)], "qa1", tmp_path / "c.png")
    with pytest.raises(UserError, match=r"tasks=\[qa1\]' --checkpoint 3$"):
        compare([results(tmp_path / "b", 3, 0.25)], "qa1", tmp_path / "c.png", step=3)


def test_a_task_that_no_suite_has_is_said_to_be_unknown(tmp_path):
    with pytest.raises(UserError, match="--task: given 'nope'; allowed: niah_single_1, .*, qa5$"):
        compare([results(tmp_path / "a", 3, 0.25)], "nope", tmp_path / "c.png")
