"""Several runs as tables, and their losses or accuracies in one picture."""

import json

import pytest
from matplotlib.image import imread

from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.config.yaml import resolved_yaml
from titans_pt.errors import UserError
from titans_pt.evaluation.compare import compare, compare_task
from titans_pt.runs.metrics import MetricsLog
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
    assert cli.run(["compare", str(a), str(b), "--task", "niah_single_1", "--out", str(tmp_path / "c.png")]) == 0
    out = capsys.readouterr().out
    assert "step 12" in out and " 50.00 %" in out and "100.00 %" in out and str(tmp_path / "c.png") in out
    assert imread(tmp_path / "c.png").std() > 0.05
    compare_task([a, b, str(a)], "niah_single_1", tmp_path / "c.png")
    assert capsys.readouterr().out.count("step 12") == 1  # named twice, drawn once
    compare_task([a], "niah_single_1", tmp_path / "c.png", step=3)
    assert " 25.00 %" in capsys.readouterr().out


def test_the_format_is_the_names(tmp_path, capsys):
    run = str(results(tmp_path / "a", 3, 0.25))
    for name, begin in (("c.pdf", b"%PDF"), ("c.svg", b"<?xml"), ("c.PNG", b"\x89PNG")):
        assert cli.run(["compare", run, "--task", "niah_single_1", "--out", str(tmp_path / name)]) == 0
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
            compare_task([folder], task_of(whole), tmp_path / "c.png")
    path.write_text(sealed)
    compare_task([folder], task_of(whole), tmp_path / "c.png")


def task_of(summary):
    """Return the first task in a summary."""
    return next(iter(next(summary[suite] for suite in ("needle", "babilong") if suite in summary)["tasks"]))


def test_without_results(tmp_path):
    with pytest.raises(
        UserError,
        match=r"holds no results of qa1; make them with: titans evaluate RUN --out .* "
        r"--suite babilong 'evaluation.babilong.tasks=\[qa1\]'$",
    ):
        compare_task([results(tmp_path / "a", 3, 0.25)], "qa1", tmp_path / "c.png")
    with pytest.raises(UserError, match=r"tasks=\[qa1\]' --checkpoint 3$"):
        compare_task([results(tmp_path / "b", 3, 0.25)], "qa1", tmp_path / "c.png", step=3)


def test_a_run_whose_task_lacks_the_suite_is_not_sent_to_it(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(resolved_yaml(load_config("recall")))
    with pytest.raises(UserError, match="a run of task=recall has no babilong suite, only recall; leave --task out$"):
        compare_task([run], "qa1", tmp_path / "c.png")


def test_a_task_that_no_suite_has_is_said_to_be_unknown(tmp_path):
    with pytest.raises(UserError, match="--task: given 'nope'; allowed: niah_single_1, .*, qa5$"):
        compare_task([results(tmp_path / "a", 3, 0.25)], "nope", tmp_path / "c.png")


def trained(folder, config, losses):
    """A run's folder with its settings, and a training and a validation loss at each tenth step."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    log = MetricsLog(folder / "metrics.jsonl", 0)
    for step, loss in enumerate(losses, start=1):
        log.write("train", 10 * step, loss=loss, tokens_per_second=100.0)
        log.write("validation", 10 * step, validation_loss=None if loss == 5.0 else loss + 0.25)
    log.close()
    return folder


def test_tables_of_runs(tmp_path, tiny, capsys):
    a = results(trained(tmp_path / "a", load_config(tiny()), [4.0, 2.0, 3.0]), 20, 0.25)
    b = results(trained(tmp_path / "b", load_config(tiny(), ["train.lr=0.5", "wandb.mode=offline"]), [5.0]), 10, 0.5)
    assert cli.run(["compare", str(a), str(b), "--out", str(tmp_path / "c.png")]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    cells = {row[0]: row[1:] for row in rows if len(row) == 3}
    config = load_config(tiny())
    batch = config.train.batch_tokens
    assert cells["tokens"] == [f"{30 * batch:,}", f"{10 * batch:,}"] and cells["parameters"] == ["-", "-"]
    assert cells["training loss (nats per token)"] == ["3", "5"]
    assert cells["validation loss (nats per token)"] == ["3.25", "-"]
    assert cells["lowest validation loss (nats per token)"] == ["2.25", "-"]
    assert cells["train.lr"] == [f"{config.train.lr:g}", "0.5"]
    assert not cells.keys() & {"run.dir", "wandb.mode", "train.max_steps"}  # names, or equal in both
    assert cells["needle.tasks.niah_single_1.by_length.2048.mean"] == ["0.25", "0.5"] and cells["step"] == ["20", "10"]
    assert imread(tmp_path / "c.png").std() > 0.05

    assert cli.run(["compare", str(a), "--checkpoint", "10", "--out", str(tmp_path / "d.png")]) == 0
    out = capsys.readouterr().out
    assert "| validation loss (nats per token) | 4.25 |" in out and "niah" not in out and "differ" not in out


def test_what_evaluations_were_made_with(tmp_path, capsys):
    for name, length in (("a", 512), ("b", 1024)):
        folder = tmp_path / name / "evaluation/step-00000003"
        folder.mkdir(parents=True)
        part = {"settings": {"length": length, "text": None}, "loss": 2.5, "frozen": [{"after": 0, "loss": 3.5}]}
        (folder / "summary.json").write_text(json.dumps(seal({"step": 3, "perplexity": part})))
    assert compare([tmp_path / "a", tmp_path / "b"], tmp_path / "c.png") is None  # folders of --out have no losses
    assert not (tmp_path / "c.png").exists()
    out = capsys.readouterr().out
    assert "| evaluation.perplexity.length | 512 | 1,024 |" in out and "perplexity.text" not in out
    assert "| perplexity.frozen.0.loss | 3.5 | 3.5 |" in out


def test_runs_of_one_name_are_told_apart(tmp_path, tiny, capsys):
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        trained(tmp_path / place / "run", load_config(tiny()), [1.0])
    compare([tmp_path / "x/run", tmp_path / "y/run", tmp_path / "y/run"], tmp_path / "c.png")
    assert f"| training | {tmp_path}/x/run | {tmp_path}/y/run |" in capsys.readouterr().out


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="neither a run nor a folder of titans evaluate --out; name the folder"):
        compare([tmp_path], tmp_path / "c.png")
    with pytest.raises(UserError, match="with results of step 7"):
        compare([tmp_path], tmp_path / "c.png", step=7)
