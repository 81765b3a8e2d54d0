import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "prepare.sbatch"


@pytest.mark.parametrize(("slurm", "words"), [
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_COUNT": "16"}, "--shard 5/16"),
    ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}, "--shard 4/8"),
    ({}, ""),
])
def test_shard_of_an_array_task(tmp_path, slurm, words):
    titans = tmp_path / "titans"
    titans.write_text("#!/bin/sh\necho \"$@\"\n")
    titans.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "32", **slurm}
    command = ["bash", SCRIPT, "c.yaml", "data.dir=/a b"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == f"prepare c.yaml data.dir=/a b --workers 32 {words}".strip(), result.stderr
