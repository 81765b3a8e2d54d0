"""A task is one file: the task here trains, resumes bit for bit and is evaluated through the common loop."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from tests.helpers.processes import curve, run_jobs
from titans_pt import cli
from titans_pt.config import Section
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.layers.flops import product
from titans_pt.layers.sharding import Shard
from titans_pt.models.backbone import Backbone, initialise
from titans_pt.runs import checkpoints
from titans_pt.runs.loaded import load_run
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tasks.base import TASKS, Task, TaskData, nan_unless_finite, with_weights
from titans_pt.training import loop
from titans_pt.training.plan import make_plan
from titans_pt.training.schedule import learning_rate

HERE = ".".join(Path(__file__).with_suffix("").parts[-4:])  # tests.titans_pt.tasks.test_contract


class Waves:
    """Sums of two sines with random phases: (T, 1) inputs, the next value of each as the target."""

    def __init__(self, seq_len: int, seed: int, noise: float):
        self.seq_len, self.seed, self.noise = seq_len, seed, noise

    def __len__(self):
        return 1000

    def sample(self, position):
        draw = np.random.default_rng([self.seed, position])
        place = np.arange(self.seq_len + 1) + draw.uniform(0, 100, (2, 1))
        wave = np.sin(place * [[0.3], [0.7]]).sum(0) + self.noise * draw.standard_normal(self.seq_len + 1)
        return wave[:-1, None].astype(np.float32), wave[1:].astype(np.float32)

    def describe(self, position):
        return {"position": position}


class Regressor(nn.Module):
    """(B, T, 1) -> (B, T): a linear input end, the backbone, a linear output end."""

    sharding = {"norm": Shard.BETWEEN}

    def __init__(self, config):
        super().__init__()
        self.enter = nn.Linear(1, config.d_model)
        self.blocks = Backbone(config)
        self.norm = nn.RMSNorm(config.d_model)
        self.leave = nn.Linear(config.d_model, 1)
        initialise(self, config)

    def forward(self, x, state=None):
        x, state = self.blocks(self.enter(x.to(self.enter.weight.dtype)), state)
        return self.leave(self.norm(x)).squeeze(-1), state

    def flops(self, length):
        return self.blocks.flops(length) + 2 * product(1, self.enter.out_features)


class SquaredError(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target, weight=None):
        y = self.model(x)[0].float()
        squares = F.mse_loss(y, target, reduction="none").mean(1)
        if weight is None:
            return nan_unless_finite(squares.mean())
        return {"loss": with_weights(squares, weight), "mae": with_weights((y - target).abs().mean(1), weight)}


@TASKS.register
class WaveTask(Task):
    name = "waves"
    unit = "squared error"
    figures = ("loss", "mae", "phase")
    suites = {"ahead": f"{HERE}:Ahead"}
    usual = ("ahead",)

    class Settings(Section):
        noise: Annotated[float, Field(ge=0.0)] = 0.0

    @classmethod
    def check(cls, config, need):
        need(config.data.seq_len >= 8, "data.seq_len", config.data.seq_len, "at least 8 for the task waves")

    def build_model(self):
        return Regressor(self.config.model)

    def objective(self, model, tensor):
        return SquaredError(model)

    def open(self):
        samples = [Waves(self.config.data.seq_len, seed, self.settings.noise) for seed in (self.config.run.seed, 2**31)]
        return TaskData(*samples, {"noise": str(self.settings.noise)}, baseline=1.0)

    def learning_rate(self, step, usual):
        return usual / 2 if step % 2 else usual

    def after_validation(self, model, step, figures):
        assert not model.training and not torch.is_grad_enabled()
        x, target = map(torch.from_numpy, Waves(self.config.data.seq_len, 8, 0.0).sample(0))
        return {"phase": float(F.mse_loss(model(x[None])[0][0], target)) / figures["loss"]}


class Ahead:
    """An evaluation suite: the squared error of each of four samples, the state carried over two halves."""

    name = "ahead"

    def __init__(self, run, config):
        self.run, self.samples = run, Waves(config.data.seq_len, 7, 0.0)
        self.keys = [f"{run.identity}-{i}" for i in range(4)]

    @torch.no_grad()
    def measure(self, i):
        x, target = map(torch.from_numpy, self.samples.sample(i))
        first, state = self.run.model(x[None, :5])
        second, _ = self.run.model(x[None, 5:], state)
        return {"error": float(F.mse_loss(torch.cat([first, second], 1)[0], target))}

    def summary(self, records):
        return {"mean": sum(r["error"] for r in records) / len(records)}

    def table(self, summary):
        return f"squared error {summary['mean']:.4f}"

    def plots(self, summary, folder, title):
        return []


@pytest.fixture
def config(tiny):
    return tiny(task="waves", run={"imports": [HERE]}, model={"mixers": ["lmm"]},
                train={"eval_every": 5, "checkpoint_every": 5, "lr": 3e-3})  # fmt: skip


def test_its_settings_and_its_plan(config):
    assert load_config(config, ["waves.noise=0.5"]).section("waves") == {"noise": 0.5}
    assert load_config(config).section("waves") == {"noise": 0.0}, "resolved"
    for override, message in {
        "waves.noise=-1.0": "waves.noise: given -1.0; allowed: greater than or equal to 0",
        "waves.nois=1.0": "waves.nois: unknown key",
        "wave.noise=1.0": "wave: unknown key .* nearest known key: waves",
        "data.seq_len=4": "data.seq_len: given 4; at least 8 for the task waves",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config(config, [override, "train.batch_tokens=64"])
    plan = make_plan(task_of(load_config(config)), 1)
    assert plan.bytes["activations"] > 0 and "logits" not in plan.bytes


@pytest.mark.usefixtures("one_group")
def test_a_figure_of_its_own_ends_the_training(config, tmp_path):
    ended = ["train.stop_when=phase <= 100", f"run.dir={tmp_path / 'run'}", "train.max_steps=20"]
    assert loop.train(load_config(config, ended)) == 0
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in found if r["kind"] == "validation"] == [5] and found[-1]["step"] == 5


@pytest.mark.thorough
def test_it_trains_resumes_and_is_evaluated(config, tmp_path, capsys, ranks, monkeypatch):
    """10 steps at once, or 5 and 5: the same weights, bit for bit. Under two tensor ranks: the same losses."""
    run_jobs(1, config, tmp_path, {"whole": [], "parts@1": ["train.stop_at=5"], "parts@2": []})
    layouts = {"tensor": ["parallel.tensor=2"], "data": ["parallel.zero_stage=2"], "sharded": ["parallel.zero_stage=3"]}
    run_jobs(2, config, tmp_path, layouts)
    for name in (checkpoints.MODEL, checkpoints.OPTIMIZER):
        whole, parts = (tmp_path / run / "checkpoints" / "step-00000010" / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()
    curves = {name: curve(tmp_path / name, "loss", "grad_norm") for name in ("whole", "parts", *layouts)}
    assert curves["parts"] == curves["whole"] and curves["whole"][-1][1] < curves["whole"][0][1]
    records = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", *layouts)}
    kinds = {name: {kind: [r for r in found if r["kind"] == kind] for kind in ("train", "validation")}
             for name, found in records.items()}  # fmt: skip
    whole = kinds["whole"]["validation"]
    assert [r["step"] for r in whole] == [5, 10] and all(r["validation_mae"] > 0 for r in whole)
    for name in layouts:
        for a, b in zip(curves["whole"], curves[name], strict=True):
            assert b == pytest.approx(a, rel=1e-4)
        for a, b in zip(whole, kinds[name]["validation"], strict=True):
            assert b["validation_phase"] == pytest.approx(a["validation_phase"], rel=1e-4)
    train = load_config(tmp_path / "whole" / "config.yaml").train
    rates = [learning_rate(step, train) / (2 if step % 2 else 1) for step in range(1, 11)]
    assert [r["lr"] for r in kinds["whole"]["train"]] == pytest.approx(rates)
    assert load_run(tmp_path / "whole").task.name == "waves"

    run = str(tmp_path / "whole")
    assert cli.run(["evaluate", run]) == 0
    assert "squared error" in capsys.readouterr().out
    summary = json.loads((tmp_path / "whole" / "evaluation" / "step-00000010" / "summary.json").read_text())
    assert 0 < summary["ahead"]["mean"] < 3

    monkeypatch.setattr(loop, "process_group", lambda timeout: nullcontext(ranks))

    def error(*words):
        assert cli.run([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "--suite: given 'needle'; allowed: ahead" in error("evaluate", run, "--suite", "needle")
    assert "trained for the task 'waves', which has no text" in error("generate", run, "--prompt", "a")
    assert "trained for the task 'waves', which has no text" in error("export", run, "--out", tmp_path / "hub")
    more = ["train.max_steps=20", f"run.dir={run}"]
    assert "waves.noise: given 0.5, but" in error("train", config, *more, "waves.noise=0.5")
    assert "task: given 'language', but" in error("train", config, *more, "task=language")
