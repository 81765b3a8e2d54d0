"""Training in real processes, two ranks on the CPU."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import ENVIRONMENT, run, run_forked
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics

pytestmark = pytest.mark.thorough

WORKER = Path(__file__).with_name("worker.py")
LAUNCHER = ["env", "TITANS_PROCESSES=2", sys.executable, "-m", "titans_pt.training.launcher"]


def losses(folder: Path) -> list[tuple]:
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in read_metrics(folder / "metrics.jsonl")
            if r["kind"] == "train"]  # fmt: skip


def tensors(folder: Path, step: int) -> list[bytes]:
    path = checkpoints.checkpoint_path(folder / "checkpoints", step)
    return [(path / name).read_bytes() for name in (checkpoints.MODEL, checkpoints.OPTIMIZER)]


def work(folder: Path, prepared: Path, jobs: list[str]) -> Path:
    """Run worker.py's ``jobs`` in ``folder``, in one start of two ranks."""
    from tests.conftest import TINY, merged

    source = {"kind": "files", "path": str(prepared.parent / "text.jsonl")}
    config = folder / "config.json"  # JSON is YAML
    config.write_text(json.dumps(merged(TINY, {"data": {"dir": str(prepared), "sources": [source]}})))
    result = run_forked(2, str(WORKER), str(config), str(folder), *jobs)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared):
    jobs = [*(f"resume:{stage}:fp32" for stage in (1, 2, 3)), "resume:2:bf16"]
    jobs += ["nan:2:1", "nan:3:1", "nan:1:2", "switch", "evaluate"]
    return work(tmp_path_factory.mktemp("runs"), prepared, jobs)


@pytest.mark.parametrize("name", ["1-fp32", "2-fp32", "3-fp32", "2-bf16"])
def test_a_resume_continues_bit_for_bit(runs, name):
    check_resume(runs, name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resume_in_bf16_continues_bit_for_bit(tmp_path, prepared, stage):
    check_resume(work(tmp_path, prepared, [f"resume:{stage}:bf16"]), f"{stage}-bf16")


def check_resume(runs: Path, name: str):
    whole, parts = runs / f"{name}-whole", runs / f"{name}-parts"
    assert [step for step, *_ in losses(whole)] == list(range(1, 7))
    assert losses(parts) == losses(whole)
    assert tensors(parts, 6) == tensors(whole, 6)
    assert losses(whole)[-1][1] < losses(whole)[0][1]


def test_every_record_says_what_an_operator_watches(runs):
    records = [r for r in read_metrics(runs / "1-fp32-parts" / "metrics.jsonl") if r["kind"] == "train"]
    for record in records:
        assert record["loss_mean"] == record["loss"]  # log_every is 1
        assert record["tokens_per_second_per_device"] == record["tokens_per_second"] / 2
        assert record["slowest_rank"] in (0, 1)
        assert record["slowest_rank_seconds"] >= record["median_rank_seconds"] > 0
        assert record["lost_to_checkpoint_seconds"] == record["lost_to_validation_seconds"] == 0


def test_evaluation_while_training_is_that_of_the_checkpoints(runs):
    from titans_pt.evaluation.runner import figures

    run = runs / "evaluated"
    logged = {r["step"]: r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "evaluation"}
    assert list(logged) == [2, 4]
    for step, record in logged.items():
        folder = run / "evaluation" / f"step-{step:08d}"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["step"] == step
        assert record == {"kind": "evaluation", "step": step} | figures(summary)
        assert {"perplexity.loss", "needle.tasks.niah_single_1.mean"} <= set(record)
        parts = [(folder / name).read_text().count("\n") for name in ("needle.jsonl", "needle-rank1.jsonl")]
        assert parts == [summary["needle"]["tasks"]["niah_single_1"]["n"] / 2] * 2
    assert logged[2]["perplexity.loss"] != logged[4]["perplexity.loss"]


def test_stages_agree(runs):
    one, two, three = (losses(runs / f"{stage}-fp32-whole") for stage in (1, 2, 3))
    assert [x[1] for x in two] == pytest.approx([x[1] for x in one], abs=1e-5)
    assert [x[1] for x in three] == pytest.approx([x[1] for x in one], abs=1e-5)


def test_another_stage_continues_the_same_curve(runs):
    straight, switched = losses(runs / "1-fp32-whole"), losses(runs / "switch")
    assert [x[1] for x in switched] == pytest.approx([x[1] for x in straight], abs=1e-5)


@pytest.mark.parametrize("name", ["2-1-nan", "3-1-nan", "1-2-nan"])
def test_a_nan_batch_changes_nothing_but_the_position(runs, name):
    folder = runs / name
    assert tensors(folder, 2) == tensors(folder, 1)
    assert tensors(folder, 3) != tensors(folder, 2)
    before, after = (checkpoints.read_state(checkpoints.checkpoint_path(folder / "checkpoints", n)) for n in (1, 2))
    assert (before.samples, after.samples) == (4, 8)
    assert (before.adam_step, after.adam_step, after.nonfinite) == (1, 1, 1)
    records = {r["step"]: r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] != "validation"}
    assert [records[n]["kind"] for n in (1, 2, 3, 4)] == ["train", "nonfinite", "train", "train"]
    assert records[2]["positions"] == [4, 7]
    assert [sample["position"] for sample in records[2]["samples"]] == [4, 5, 6, 7]
    assert records[4]["skipped"] == 1


def wait_for_steps(folder: Path, process: subprocess.Popen, steps: int = 3, timeout: float = 200):
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if len(read_metrics(folder / "metrics.jsonl")) >= steps:
            return
        time.sleep(0.05)
    pytest.fail(f"no {steps} steps: {process.communicate(timeout=10)}")


def start(command: list[str], **variables: str) -> subprocess.Popen:
    environment = ENVIRONMENT | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sigterm_under_our_torchrun_leaves_a_checkpoint_that_one_process_continues(tiny, tmp_path):
    folder, config = tmp_path / "run", str(tiny(train={"max_steps": 100_000}))
    process = start([*LAUNCHER, config])
    wait_for_steps(folder, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    (saved,) = checkpoints.list_checkpoints(folder / "checkpoints")
    step = checkpoints.read_state(saved).step
    assert checkpoints.verify(saved) == []
    assert losses(folder)[-1][0] == step

    result = run([sys.executable, "-m", "titans_pt", "train", config, f"train.stop_at={step + 2}"])
    assert result.returncode == 0, result.stderr
    assert [x[0] for x in losses(folder)] == list(range(1, step + 3))


def test_a_launcher_that_is_killed_ends_its_processes_with_a_checkpoint(tiny, tmp_path):
    folder = tmp_path / "run"
    process = start([*LAUNCHER, str(tiny(train={"max_steps": 100_000}))])
    wait_for_steps(folder, process)
    process.kill()
    process.communicate(timeout=200)  # waits for the processes, which hold the pipes
    (saved,) = checkpoints.list_checkpoints(folder / "checkpoints")
    assert checkpoints.verify(saved) == []
    assert losses(folder)[-1][0] == checkpoints.step_of(saved)


def test_a_signal_ends_a_single_process_with_its_status(tiny, tmp_path):
    folder = tmp_path / "run"
    process = start([sys.executable, "-m", "titans_pt", "train", str(tiny(train={"max_steps": 100_000}))])
    wait_for_steps(folder, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert "the same command continues" in out
    assert len(checkpoints.list_checkpoints(folder / "checkpoints")) == 1


def test_a_run_outlives_its_readers_and_ends_with_a_checkpoint_when_its_terminal_closes(tiny, tmp_path):
    folder, foreign = tmp_path / "run", {"MASTER_ADDR": "node7", "RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}
    process = start([sys.executable, "-m", "titans_pt", "train", str(tiny(train={"max_steps": 100_000}))], **foreign)
    wait_for_steps(folder, process)
    process.stdout.close()
    process.stderr.close()
    wait_for_steps(folder, process, steps=len(read_metrics(folder / "metrics.jsonl")) + 3)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=200) == 128 + signal.SIGHUP
    (saved,) = checkpoints.list_checkpoints(folder / "checkpoints")
    assert checkpoints.verify(saved) == []
    log = (folder / "log.txt").read_text()
    assert f"stopped by signal 1 at step {checkpoints.step_of(saved)}; checkpoint {saved}" in log
    assert "Error" not in log


def test_an_error_of_all_ranks_is_told_once_and_not_repeated(tiny):
    result = run([*LAUNCHER, str(tiny()), "data.dir=/nowhere/at/all"])
    assert result.returncode == 2
    assert result.stderr.count("titans: error:") == 1
