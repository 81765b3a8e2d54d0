"""Checks of any model on several ranks."""

from pathlib import Path

import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from titans_pt import cli
from titans_pt.runs.loaded import load_run


def check_ranks(config: Path, folder: Path, jobs: dict[str, list[str]]):
    """Assert that two ranks with each job's settings train like one process, and learn. The run of the job "two" is
    exported and imported."""
    run_jobs(1, config, folder, {"one": []})
    run_jobs(2, config, folder, jobs)
    one = curve(folder / "one", "loss", "grad_norm")
    assert len(one) == 10 and one[-1][1] < one[0][1]
    for job in jobs:
        for a, b in zip(one, curve(folder / job, "loss", "grad_norm"), strict=True):
            assert b == pytest.approx(a, rel=1e-4), job
    assert cli.run(["export", str(folder / "two"), "--out", str(folder / "hub")]) == 0
    assert cli.run(["import", str(folder / "hub"), "--out", str(folder / "back")]) == 0
    ids = torch.zeros(1, 5, dtype=torch.int64)
    mine, back = (load_run(folder / job).model(ids)[0] for job in ("two", "back"))
    torch.testing.assert_close(back, mine, rtol=0, atol=0)
