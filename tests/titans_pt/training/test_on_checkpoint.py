"""The user's command after each checkpoint."""

import json
import os
import sys

import pytest

from titans_pt.config.files import load_config
from titans_pt.runs import checkpoints
from titans_pt.training import loop

pytestmark = pytest.mark.usefixtures("one_group")
NOTES = "import json, os; print(json.dumps(dict(os.environ)))"


def test_it_sees_each_complete_checkpoint_and_nothing_of_the_ranks(tiny, tmp_path, monkeypatch):
    """With RANK and WORLD_SIZE ``titans evaluate`` would do one rank's share of the samples."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "SLURM_STEP_NUM_TASKS": "2",
             "SLURM_ARRAY_TASK_ID": "3"}  # fmt: skip
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "notes.py"
    script.write_text(NOTES)
    command = f'"{sys.executable}" "{script}" && ls "$TITANS_CHECKPOINT/manifest.json" >&2'
    config = load_config(tiny(train={"max_steps": 4, "checkpoint_every": 2}, run={"on_checkpoint": command}))
    assert loop.train(config) == 0
    run = tmp_path / "run"
    lines = (run / "on-checkpoint.txt").read_text().splitlines()
    seen, found = [json.loads(line) for line in lines[::2]], lines[1::2]
    assert found == [str(checkpoints.checkpoint_path(run / "checkpoints", step) / "manifest.json") for step in (2, 4)]
    assert [one["TITANS_STEP"] for one in seen] == ["2", "4"]
    for one in seen:
        assert one["TITANS_RUN"] == str(run)
        assert one["PATH"] == os.environ["PATH"]
        assert not place.keys() & one.keys()


def test_a_command_that_fails_is_a_warning(tiny, tmp_path, caplog):
    config = load_config(tiny(train={"max_steps": 4}, run={"on_checkpoint": "no-such-command"}))
    assert loop.train(config) == 0
    (said,) = [each for each in caplog.messages if "run.on_checkpoint" in each]
    output = tmp_path / "run" / "on-checkpoint.txt"
    assert said == f"run.on_checkpoint: status 127 after step 4; its output is in {output}"
    assert "no-such-command" in output.read_text()


def test_without_room_for_its_output_training_goes_on(tiny, tmp_path, caplog):
    (tmp_path / "run" / "on-checkpoint.txt").mkdir(parents=True)
    config = load_config(tiny(train={"max_steps": 4}, run={"on_checkpoint": "true"}))
    assert loop.train(config) == 0
    assert "run.on_checkpoint: not run after step 4" in caplog.text
