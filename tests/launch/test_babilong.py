"""The curriculum of docs/evaluation.md: what the script starts, and once for real, at tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command_line import parsed
from tests.helpers.processes import ENVIRONMENT, ROOT
from tests.helpers.untrained import untrained_run
from titans_pt.runs import checkpoints
from titans_pt.training.metrics import read_metrics

SCRIPT = str(ROOT / "launch" / "babilong.sh")


def test_every_stage_takes_the_weights_of_the_one_before(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\t" "$@"\necho\n')
    python.chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    environment = os.environ | {"PYTHON": str(python), "LENGTHS": "64 128", "STEPS": "50", "PROCESSES": "1"}
    words = ["train.lr=1e-4", "evaluation.babilong.samples=2"]
    command = [SCRIPT, "run", "out", *words]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    calls = [line.rstrip("\t").split("\t") for line in result.stdout.splitlines() if line.startswith("-m")]
    commands = [["train"] * call[1].endswith("launcher") + call[2:] for call in calls]
    assert [command[0] for command in commands] == 2 * ["babilong", "prepare", "train"] + ["evaluate"]
    for command in commands:
        parsed(*command)
    stages = [command for command in commands if command[0] == "train"]
    assert ["train.init_from=run" in stages[0], "train.init_from=out/64" in stages[1]] == [True, True]
    assert all(stage[-2:] == words for stage in stages)
    assert commands[-1][1] == "out/128"
    assert "evaluation.babilong.lengths=[64,128]" in commands[-1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_curriculum(tmp_path, prepared):
    run = untrained_run(tmp_path / "run", prepared)
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays/garden.txt").write_text("The garden was green and the river ran along it for miles. " * 30)
    words = [
        "evaluation.babilong.haystack.kind=files", f"evaluation.babilong.haystack.path={tmp_path / 'essays'}",
        "evaluation.babilong.tasks=[qa1]", "evaluation.babilong.samples=1", "train.batch_tokens=1800",
        "train.micro_batch=1", "data.validation_fraction=0.2", "evaluation.babilong.max_new_tokens=8",
    ]  # fmt: skip
    environment = ENVIRONMENT | {"PYTHON": sys.executable, "PROCESSES": "2", "STEPS": "3", "DOCUMENTS": "30",
                                 "LENGTHS": "450 900"}  # fmt: skip
    command = [SCRIPT, str(run), str(tmp_path / "out"), *words]
    for _ in range(2):  # the second start finds all done
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    origins = []
    for length in (450, 900):
        stage = tmp_path / "out" / str(length)
        assert [r["step"] for r in read_metrics(stage / "metrics.jsonl") if r["kind"] == "train"] == [1, 2, 3]
        origins.append(checkpoints.read_state(checkpoints.find(stage / "checkpoints")).origin)
    assert origins[0].startswith(str(run)) and origins[1].startswith(str(tmp_path / "out/450/"))
    (summary,) = Path(tmp_path / "out/900/evaluation").glob("*/summary.json")
    assert json.loads(summary.read_text())["babilong"]["tasks"]["qa1"]["n"] == 2
