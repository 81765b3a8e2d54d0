"""Forecasting as a task: the model by its invariances, samples by hand, training, resume, evaluation, a user's file."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.evaluation.forecast import Forecasts
from titans_pt.forecasting.protocol import Windows, errors
from titans_pt.kernels.memory import chunked
from titans_pt.runs import checkpoints
from titans_pt.tasks import task_of
from titans_pt.tasks.forecast import ABOUT, WindowSamples, forecast_with
from titans_pt.training import loop
from titans_pt.training.plan import _Saved, make_plan

SMALL = [
    "data.seq_len=24", "forecast.patch=8", "forecast.horizon=6", "forecast.stride=4", "forecast.windows=40",
    "model.d_model=16", "model.n_layers=1", "model.mlp_hidden=16", "model.memory.chunk_size=4", "model.window=8",
    "train.max_steps=8",
    "train.batch_tokens=192", "train.micro_batch=4", "train.decay_steps=4", "train.eval_every=4", "train.log_every=1",
    "train.checkpoint_every=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """A CSV file of 240 hours: two waves and a little noise."""
    path = tmp_path_factory.mktemp("series") / "own.csv"
    draw, t = np.random.default_rng(0), np.arange(240)
    waves = np.stack([np.sin(0.5 * t), 10 + 3 * np.cos(0.26 * t)], 1) + 0.1 * draw.standard_normal((240, 2))
    hours = np.datetime64("2020-01-01T00:00", "h") + t
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["date", "a", "b"])
        writer.writerows([str(hour).replace("T", " ") + ":00", *row] for hour, row in zip(hours, waves, strict=True))
    return path


def settings(series, folder, *words):
    return load_config("forecast/lmm", [*SMALL, f"forecast.series={series}", f"run.dir={folder}", *words])


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "deltanet"])
def test_a_constant_lookback_has_gradients_as_others_do(series, tmp_path, mixer):
    """Rain or night sun: less its mean, the lookback is zero, where scaling to unit length has no usable gradient."""
    torch.manual_seed(0)
    model = task_of(settings(series, tmp_path, f"model.mixers=[{mixer}]", "model.n_layers=2")).build_model()
    norms = []
    for constant in (False, True):
        x = torch.randn(4, 2, 48, generator=torch.Generator().manual_seed(1))
        x[:, 1] = 3.0 if constant else x[:, 1]
        model.zero_grad()
        model(x)[0].square().mean().backward()
        norms.append(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5)
    assert norms[1] < 10 * norms[0]


@pytest.mark.parametrize("mixer", ["lmm", "mac", "mag", "mal", "attention", "mamba2", "gated_deltanet"])
def test_a_forecast_follows_shift_and_scale_and_lookbacks_are_one_sequence(series, tmp_path, mixer):
    torch.manual_seed(0)
    model = task_of(settings(series, tmp_path, f"model.mixers=[{mixer}]")).build_model().eval()
    x = torch.randn(3, 2, 48)
    with torch.no_grad():
        whole, _ = model(x)
        first, state = model(x[..., :24])
        second, _ = model(x[..., 24:], state)
        moved, _ = model(5 * x - 7)
        alone, _ = model(x[:, 1:, 24:])
    assert whole.shape == (3, 2, 2, 6)
    torch.testing.assert_close(torch.cat([first, second], 2), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(moved, 5 * whole - 7, atol=2e-3, rtol=2e-3)
    assert (alone - second[:, 1:]).abs().max() > 1e-4, "the first lookback is remembered in the second"


@pytest.mark.parametrize("rows", range(40, 75))
def test_a_series_is_streamed_where_a_lookback_fits(rows):
    """For any number of test rows, the job exists if and only if it has windows."""
    suite = object.__new__(Forecasts)
    suite.lookback, suite.horizon, suite.phases = 24, 6, [n * 3 for n in range(8)]
    suite.parts = SimpleNamespace(test=SimpleNamespace(start=31, rows=np.zeros((rows, 1))))
    starts = [start for start in suite._lookbacks() if start + 24 >= 31 + 24]
    assert all(start + phase + 24 + 6 <= 31 + rows for start in starts for phase in suite.phases)
    assert bool(starts) == (rows >= 48 + 21 + 6 - 31 + 24)


def test_samples_by_hand():
    rows = np.stack([np.arange(20), 100 + np.arange(20)], 1).astype(np.float32)
    samples = WindowSamples(Windows(rows, 8, 3), 4, None, None)
    x, y = samples.sample(2)
    assert x.tolist() == [list(range(2, 10)), list(range(102, 110))]
    assert y[0].tolist() == [[6, 7, 8], [10, 11, 12]], "behind each of two lookbacks"
    drawn = WindowSamples(Windows(rows, 8, 3), 8, 5, 1)
    epochs = [[drawn.places[5 * epoch + i] for i in range(5)] for epoch in range(2)]
    assert all(len(set(epoch)) == 5 for epoch in epochs) and epochs[0] != epochs[1]
    assert epochs[0] == [WindowSamples(Windows(rows, 8, 3), 8, 5, 1).places[i] for i in range(5)]
    assert drawn.describe(3) == {"position": 3, "first row": epochs[0][3]}


def test_settings_that_do_not_go_together(series, tmp_path):
    for words, message in (
        (["data.seq_len=26", "train.batch_tokens=208"], "data.seq_len: given 26; must be .* such as 24"),
        (["forecast.lookback=16"], "forecast.lookback: given 16; must divide data.seq_len=24"),
        (["forecast.stride=9"], "forecast.stride|data.seq_len: given"),
        (["train.z_loss=0.1"], "train.z_loss: given 0.1; not with task=forecast"),
    ):
        with pytest.raises(UserError, match=message):
            settings(series, tmp_path, *words)
    with pytest.raises(UserError, match="forecast.horizon: given 90 with a lookback of 24 rows; the validation part"):
        task_of(settings(series, tmp_path, "forecast.horizon=90")).open()


@pytest.fixture(scope="module")
def run(series, tmp_path_factory, one_group):
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("forecast") / "whole"
    assert loop.train(settings(series, folder)) == 0
    return folder


def test_it_resumes_bit_for_bit(run, series, tmp_path):
    for words in (["train.stop_at=5"], []):
        assert loop.train(settings(series, tmp_path / "parts", *words)) == 0
    whole, parts = (f / "checkpoints/step-00000008" / checkpoints.MODEL for f in (run, tmp_path / "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    with pytest.raises(UserError, match="forecast.windows: given 41, but .* was trained with 40"):
        loop.train(settings(series, tmp_path / "parts", "forecast.windows=41"))


def test_it_is_evaluated_beside_baselines(run, capsys):
    assert cli.run(["evaluate", str(run)]) == 0
    out = capsys.readouterr().out
    for words in ("lmm (this run)", "ridge on the lookback", "last value", "last day", "state carried along"):
        assert words in out
    (folder,) = (run / "evaluation").iterdir()
    found = json.loads((folder / "summary.json").read_text())["forecast"]
    assert found["rows"]["model"]["n"] == 48 - 6 + 1 and found["channels"] == 2
    assert (run / "plots/forecast.png").is_file()

    from titans_pt.runs.loaded import load_run

    loaded = load_run(run)
    test = loaded.task.split(loaded.task.read(), 24).test
    off = [forecast_with(loaded.model, test.window(i)[0][None])[0] - test.window(i)[1] for i in range(len(test))]
    assert found["rows"]["model"]["mse"] == pytest.approx(np.mean(np.square(off)), rel=1e-4), "window by window"
    assert errors(lambda x: forecast_with(loaded.model, x), test)[1].mean() == pytest.approx(
        np.abs(off).mean(), rel=1e-4
    )


def test_other_numbers_are_no_test_of_a_run(run, series, tmp_path, capsys):
    own = tmp_path / "own.csv"
    own.write_text(series.read_text())
    assert loop.train(settings(own, tmp_path / "run")) == 0
    assert cli.run(["evaluate", str(tmp_path / "run")]) == 0
    own.write_text(series.read_text().replace(",1", ",2", 1))
    assert cli.run(["evaluate", str(tmp_path / "run")]) == 2
    assert f"forecast.series: {own} holds other numbers than {tmp_path}/run was trained on" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"{own} holds other numbers than .*step-00000008 was trained on; "):
        loop.train(settings(own, tmp_path / "run", "train.max_steps=9"))
    own.write_text(series.read_text().replace("date,a,b", "date,b,a"))
    assert cli.run(["evaluate", str(tmp_path / "run")]) == 2
    assert f"forecast.series: {own} has other columns than {tmp_path}/run was trained on" in capsys.readouterr().err
    own.write_text(series.read_text())
    (tmp_path / "run" / ABOUT).write_text("[]")
    assert cli.run(["evaluate", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'run' / ABOUT}: missing or damaged (" in told and "the same titans train command wri" in told
    assert loop.train(settings(own, tmp_path / "run")) == 0
    assert cli.run(["evaluate", str(tmp_path / "run")]) == 0


def test_a_run_of_another_task_forecasts_nothing(tmp_path, prepared, capsys):
    path = untrained_run(tmp_path / "run", prepared)
    assert cli.run(["forecast", str(path)]) == 2
    assert f"{path}: trained for the task 'language'; name the folder of a run with task=fo" in capsys.readouterr().err


def test_the_channels_of_a_series_that_is_not_there_yet(tmp_path):
    """A plan needs no data: one channel is counted."""
    assert task_of(settings(tmp_path / "later.csv", tmp_path)).channels == 1


def test_notes_on_a_series_are_printed(series, tmp_path, capsys):
    own = tmp_path / "own.csv"
    lines = series.read_text().splitlines(keepends=True)
    own.write_text("".join(lines[:100] + lines[101:]))
    task_of(settings(own, tmp_path, "forecast.gaps=fill")).open()
    assert "series own: 1 absent rows in 1 gaps" in capsys.readouterr().out


@pytest.mark.slow  # four processes
def test_ranks_change_nothing(run, series, tmp_path):
    from titans_pt.config.yaml import resolved_yaml

    config = tmp_path / "config.yaml"
    config.write_text(resolved_yaml(settings(series, tmp_path / "run")))
    run_jobs(4, config, tmp_path, {"both": ["parallel.tensor=2", "parallel.zero_stage=2"]})
    for a, b in zip(curve(run, "loss", "grad_norm"), curve(tmp_path / "both", "loss", "grad_norm"), strict=True):
        assert b == pytest.approx(a, rel=1e-3)


def test_a_file_of_the_users_goes_on(run, series, tmp_path, capsys):
    out = tmp_path / "next.csv"
    assert cli.run(["forecast", str(run), "--csv", str(series), "--steps", "9", "--out", str(out)]) == 0
    assert "rows after the first 6 (forecast.horizon) are forecast from forecasts" in capsys.readouterr().out
    rows = list(csv.reader(out.open()))
    assert rows[0] == ["date", "a", "b"] and len(rows) == 10
    assert (rows[1][0], rows[9][0]) == ("2020-01-11 00:00:00", "2020-01-11 08:00:00")
    assert all(6 < float(row[2]) < 14 for row in rows[1:]), "in the file's own units"
    assert out.with_suffix(".png").is_file()
    assert all(len(row[2].partition(".")[2]) >= 4 for row in rows[1:]), "six digits of what varies, whatever the level"

    def error(*words):
        assert cli.run(["forecast", str(run), *map(str, words)]) == 2
        return capsys.readouterr().err

    short = tmp_path / "short.csv"
    short.write_text("\n".join(series.read_text().splitlines()[:20]))
    assert "19 rows; the run forecasts from the last 24" in error("--csv", short)
    short.write_text(series.read_text().replace("date,a,b", "date,a,c"))
    assert f"no column 'b'; {run} was trained on a, b, the file has a, c; give" in error("--csv", short)
    assert "cannot be read" in error("--csv", tmp_path / "nothing.csv")
    lines = series.read_text().splitlines()
    short.write_text("\n".join([*lines[:-1], lines[-1].split(",")[0] + ",1,1e60"]))
    assert "more than 1e+12 standard deviations from the mean of the training rows" in error("--csv", short)
    own = tmp_path / "own.csv"
    own.write_text(series.read_text())
    assert "is the input of the forecast" in error("--csv", own, "--out", own)
    assert own.read_text() == series.read_text(), "nothing lost"
    assert "name a CSV file" in error("--csv", own, "--out", tmp_path / "next.png")


def test_how_a_users_file_is_read_can_be_said(run, series, tmp_path, capsys):
    """The setting that an error proposes works with the same command."""
    head, *rows = series.read_text().splitlines()
    gaps = tmp_path / "gaps.csv"
    gaps.write_text("\n".join([head, *rows[:100], *rows[103:-1], rows[-1].split(",")[0] + ",,"]))
    words = ["forecast", str(run), "--csv", str(gaps), "--out", str(tmp_path / "next.csv")]
    assert cli.run(words) == 2
    assert "3 rows are absent in 1 gaps" in (said := capsys.readouterr().err) and "set forecast.gaps=fill" in said
    assert cli.run([*words, "forecast.gaps=fill", "forecast.missing=fill"]) == 0
    assert "3 absent rows in 1 gaps were filled" in capsys.readouterr().out
    assert (tmp_path / "next.csv").read_text().splitlines()[1].startswith("2020-01-11 00:00:00,")
    assert cli.run([*words, "forecast.horizon=3"]) == 2
    assert "forecast.horizon=3: not for titans forecast; allowed: forecast.missing" in capsys.readouterr().err
    daily = tmp_path / "daily.csv"
    days = np.datetime64("2020-01-01") + np.arange(60)
    daily.write_text("date,b,a\n" + "\n".join(f"{day},{n},{n % 7}" for n, day in enumerate(days)))
    assert cli.run([*words[:2], "--csv", str(daily), "--out", str(tmp_path / "next.csv")]) == 0
    assert "rows are 1 day, 0:00:00 apart, those of the training 1:00:00" in capsys.readouterr().out


@pytest.mark.parametrize("mixer", ["lmm", "attention", "mamba2"])
@pytest.mark.usefixtures("without_c")
def test_a_plan_counts_channels_as_rows(series, tmp_path, monkeypatch, mixer):
    """Tokens, FLOPs and memory count all channels, whose number the file's header gives before the file is read."""
    monkeypatch.setattr(chunked, "KEEP_BYTES", 0)
    monkeypatch.setattr(chunked, "GROUP_BYTES", 0)
    wide = tmp_path / "wide.csv"
    lines = series.read_text().splitlines()
    wide.write_text("\n".join([lines[0] + ",c,d,e,f", *(line + ",1,2,3,4" for line in lines[1:])]))
    big = ("data.seq_len=96", "train.batch_tokens=768", f"model.mixers=[{mixer}]")
    task = task_of(settings(wide, tmp_path, *big))
    plan, one = make_plan(task, 1), make_plan(task_of(settings(wide, tmp_path, *big, "forecast.columns=[b]")), 1)
    tokens = 8 * 6 * 24  # samples, channels, patches
    assert "the blocks read each sample as 6 rows of 24 tokens: 1,152 tokens per step, 9,216 in all" in plan.text()
    assert plan.cost.read == 8 * tokens and plan.cost.flops == pytest.approx(6 * one.cost.flops)
    model = task.build_model()
    ends = 6 * (24 * 8 * 16 + 16 * 6) * 6 * 8 * 8  # a multiply-add: 2, backward 4; channels, samples, steps
    assert plan.cost.flops == pytest.approx(8 * tokens * model.blocks.flops(24).total + ends)
    with _Saved(model) as saved:
        task.objective(model, None)(torch.randn(4, 6, 96), torch.randn(4, 6, 1, 6))
    of_the_model = ("parameters", "gradients", "optimiser", "communication")
    kept = sum(size for kind, size in plan.bytes.items() if kind not in of_the_model)
    assert kept == pytest.approx(saved.total, rel=0.2)
    named = task_of(load_config("forecast/lmm", ["forecast.series=ECL", f"run.dir={tmp_path}"]))
    assert named.channels == 321 and named.sequences(2, 96) == (642, 12)
    assert task_of(settings(tmp_path / "none.csv", tmp_path)).channels == 1
