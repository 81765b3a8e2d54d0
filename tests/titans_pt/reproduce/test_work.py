"""Shared work: claims, the order of the work, and a study that is killed and finished."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.processes import ENVIRONMENT
from tests.titans_pt.reproduce.records import record
from titans_pt.cli import run as titans
from titans_pt.config.files import load_config
from titans_pt.errors import Diverged, UserError
from titans_pt.reproduce import runs
from titans_pt.reproduce import work as working
from titans_pt.reproduce.claims import claim
from titans_pt.reproduce.order import Order, chosen, runs_of
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.studies import study
from titans_pt.training import loop

HOLD = """
import sys, subprocess, time
from pathlib import Path
from titans_pt.reproduce.claims import claim
with claim(Path(sys.argv[1])) as descriptor:
    child = subprocess.Popen(["sleep", "100"], pass_fds=[descriptor]) if sys.argv[2] == "child" else None
    print(child.pid if child else 0, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("who", ["alone", "child"])
def test_a_claim_ends_with_the_processes_that_hold_it(tmp_path, who):
    path = tmp_path / "claims" / "a-run"
    with subprocess.Popen([sys.executable, "-c", HOLD, path, who], env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        with claim(path) as mine:
            assert mine is None
        process.kill()
        process.wait()
    if child:
        with claim(path) as mine:
            assert mine is None, "a process that was started with it goes on"
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while True:
        with claim(path) as mine:
            if mine is not None:
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stage_after_a_failed_one_fails_without_training(tmp_path, monkeypatch):
    """An error of its missing weights would stop the whole study, and an early checkpoint would be taken for them."""
    order = Order(tmp_path, models=["lmm"])
    planned, records = runs_of(chosen(study("ruler", "tiny"), order), order), Records(tmp_path / "records")
    records.write(planned[0].name, record(planned[0], failed="diverged"))
    monkeypatch.setattr(loop, "train", lambda config: pytest.fail("trained"))
    assert working.work(planned, tmp_path, records, 1, lambda: None) == 0
    second, third = (records.read(f"lmm-stage-{n}-s0") for n in (2, 3))
    assert second["failed"] == "lmm-stage-1-s0, from which it starts, failed" and second["trained"]["steps"] == 0
    assert third["failed"] == "lmm-stage-2-s0, from which it starts, failed"


@dataclass
class StandIn:
    """A stand-in for a run that only logs the order of events."""

    name: str
    log: list
    needs: list = field(default_factory=list)
    done: bool = False

    def probes(self, records):
        return []

    def record(self, records):
        return {} if self.done else None

    def missing(self, record):
        return [] if self.done else ["training"]

    def settled(self, records):
        return self if all(run.done for run in self.needs) else None

    def complete(self, records, ranks, descriptor):
        self.log.append(self.name)
        self.done = True
        return 0


def test_work_goes_by_worth_and_leaves_to_others_what_they_do(tmp_path, monkeypatch):
    log, pages = [], []
    probe, later = StandIn("probe", log), StandIn("later", log)
    whole, taken = StandIn("whole", log, [probe]), StandIn("taken", log)

    def pause(seconds):
        probe.done = True  # another process has finished it

    monkeypatch.setattr(working.time, "sleep", pause)
    with claim(tmp_path / "claims" / "probe"), claim(tmp_path / "claims" / "taken"):
        status = working.work([probe, whole, taken, later], tmp_path, Records(tmp_path), 1, lambda: pages.append(1))
    assert (status, log, len(pages)) == (0, ["later", "whole"], 2)
    assert not taken.done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_passes_a_stop_on_and_waits_for_the_checkpoint(tmp_path, tiny, monkeypatch, number):
    stub, started = tmp_path / "python", tmp_path / "started"
    stub.write_text(f"""#!/usr/bin/env bash
trap 'sleep 0.2; touch {tmp_path}/saved; exit {128 + number}' {number.name[3:]}
touch {started}
while :; do sleep 0.05; done
""")
    stub.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(stub))

    def stop():
        while not started.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=stop).start()
    with claim(tmp_path / "claim") as descriptor:
        config = load_config(tiny(run={"dir": str(tmp_path / "run")}))
        assert runs._torchrun(config, 2, descriptor) == 128 + number
    assert (tmp_path / "saved").exists() and signal.getsignal(number) == before


def test_a_training_that_is_stopped_stops_the_work(tmp_path):
    log = []
    first, second = StandIn("first", log), StandIn("second", log)
    first.complete = lambda *_: 143
    assert working.work([first, second], tmp_path, Records(tmp_path), 1, lambda: None) == 143
    assert log == []


# ---- real runs, as small as can be

SMALL = [
    "model.vocab_size=288", "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.mlp_hidden=32",
    "model.window=8", "data.seq_len=16", "train.batch_tokens=64", "train.micro_batch=4", "train.checkpoint_every=1",
    "train.eval_samples=4",
]  # fmt: skip


WHOLE = "swa-s0-lr0.01"
"""The run whose learning rate was chosen from the two given."""


def words(prepared: Path, out: Path, steps: int) -> list[str]:
    source = f"data.sources=[{{kind: files, path: {prepared.parent / 'text.jsonl'}}}]"
    return ["reproduce", "table1", "--size", "tiny", "--models", "swa", "--seeds", "0", "--tokens", str(64 * steps),
            "--rates", "1e-3,1e-2", "--out", str(out), f"data.dir={prepared}", source,
            "data.validation_fraction=0.2", *SMALL]  # fmt: skip


@pytest.mark.thorough
def test_a_study_is_done_once(prepared, tmp_path, ranks, monkeypatch, capsys):
    monkeypatch.setattr(loop, "process_group", lambda timeout: nullcontext(ranks))
    out = tmp_path / "out"
    assert titans([*words(prepared, out, 10), "--dry-run"]) == 0
    assert "| swa-s0 |" in capsys.readouterr().out and not out.exists()
    assert titans(words(prepared, out, 10)) == 0
    kept = {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()}
    assert {path.stem for path in kept} == {"swa-lr0.001", "swa-lr0.01", WHOLE}
    record = Records(out / "records").read(WHOLE)
    tried = [Records(out / "records").read(f"swa-lr{rate}")["trained"]["validation_loss"] for rate in (0.001, 0.01)]
    assert record["rates"] == [[0.001, tried[0]], [0.01, tried[1]]]
    assert record["trained"]["steps"] == 10 and set(record["measured"]) == {"text", "long"}
    assert f"== {WHOLE}: training, text, long" in capsys.readouterr().out
    table = (out / "table1.md").read_text()
    assert record["trained"]["checkpoint"][:12] in table

    assert titans(words(prepared, out, 10)) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()} == kept
    assert "==" not in capsys.readouterr().out
    assert (out / "table1.md").read_text() == table

    assert titans(words(prepared, out, 20)) == 2
    assert "of a run with train.max_steps=1, asked for is 2; choose another folder" in capsys.readouterr().err
    texts = {path: path.read_text() for path in (out / "records").iterdir()}
    measured = {name: found for name, found in record["measured"].items() if name != "long"}
    Records(out / "records").write(WHOLE, record | {"measured": measured})
    (out / "runs" / WHOLE / "checkpoints").rename(out / "elsewhere")
    assert titans(words(prepared, out, 10)) == 2
    said = f"{WHOLE}.json: trained elsewhere, and {out}/runs/{WHOLE} has no weights to measure long of; copy the run's"
    assert said in capsys.readouterr().err
    (out / "elsewhere").rename(out / "runs" / WHOLE / "checkpoints")
    for path in texts:
        path.unlink()
    assert titans(words(prepared, out, 20)) == 2
    said = capsys.readouterr().err
    assert f"{out}/runs/swa-lr0.001: of a run with train.max_steps=1, asked for is 2;" in said
    assert said.endswith(f"or delete the run's record and {out}/runs/swa-lr0.001 to run it again\n")
    for path, text in texts.items():
        path.write_text(text)

    record["trained"]["data"]["data"] = "of another edition"
    Records(out / "records").write(WHOLE, record)
    assert titans(words(prepared, out, 10)) == 2
    assert f"{WHOLE}.json: trained on other text than {out}/records/swa-lr0.01.json" in capsys.readouterr().err
    for probe in (out / "records").glob("swa-lr*"):
        probe.unlink()
    assert titans(words(prepared, out, 10)) == 2
    assert f"{WHOLE}.json: trained on other text than the files in data.dir" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_model_more_is_a_row_more(prepared, tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(loop, "process_group", lambda timeout: nullcontext(ranks))
    out = tmp_path / "out"
    asked = words(prepared, out, 10)
    assert titans(asked) == 0
    alone = (out / "table1.md").read_text()
    asked[asked.index("swa")] = "transformer"
    assert titans(asked) == 0
    both = (out / "table1.md").read_text()
    row = re.search(r"^\| sliding window \| \d.*$", alone, re.M)[0]
    assert row in both and re.search(r"^\| Transformer\+\+ \| \d.*\n\| sliding window \| \d", both, re.M)


def test_a_run_that_diverges_has_a_record_and_any_other_error_none(prepared, tmp_path, monkeypatch, capsys):
    said = "train.max_nonfinite: the last 10 steps (to 12) had a loss that is not finite; nothing was saved since"

    def ends_with(kind):
        def train(config):
            raise kind(said)

        monkeypatch.setattr(loop, "train", train)

    ends_with(Diverged)
    assert titans(words(prepared, tmp_path, 10)) == 0
    records = Records(tmp_path / "records")
    failed = records.read("swa-s0-lr0.001")
    assert failed["failed"] == said.partition(";")[0] and not failed["measured"]
    assert failed["rates"] == [[0.001, None], [0.01, None]]
    assert f"failed ({said.partition(';')[0]})" in (tmp_path / "table1.md").read_text()
    ends_with(UserError)
    said = "train.max_nonfinite: any other error of the same words"
    for path in records.folder.iterdir():
        path.unlink()
    assert titans(words(prepared, tmp_path, 10)) == 2
    assert said in capsys.readouterr().err and not list(records.folder.iterdir())


def test_several_ranks_that_diverge_have_the_same_record(prepared, tmp_path, monkeypatch):
    said = "train.max_nonfinite: the last 10 steps (to 12) had a loss that is not finite"
    launcher = tmp_path / "launcher"  # replaces torchrun; its arguments are -m, the module and the settings
    launcher.write_text(f"#!/bin/sh\necho '{said}; nothing was saved since' > $(dirname $3)/diverged.txt\nexit 2\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    more = [*words(prepared, tmp_path, 10), "--ranks", "2", "train.micro_batch=2"]
    assert titans(more) == 0
    record = Records(tmp_path / "records").read("swa-s0-lr0.001")
    assert record["failed"] == said and not record["measured"]
    (tmp_path / "records" / "swa-s0-lr0.001.json").unlink()
    launcher.write_text("#!/bin/sh\nexit 2\n")
    assert titans(more) == 2, "what an earlier training says does not count"
    assert not Records(tmp_path / "records").names("swa-s0")


def _until(condition, process: subprocess.Popen):
    while not condition():
        assert process.poll() is None, process.stderr.read()[-3000:]
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_three_times_the_table_is_the_same(prepared, tmp_path):
    """Kill the study while a rate is tried, while the model is trained, and while it is measured."""
    steps = 60
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    subprocess.run(_titans(words(prepared, undisturbed, steps)), env=ENVIRONMENT, check=True, capture_output=True)
    run = killed / "runs" / WHOLE
    moments = [
        lambda: any((killed / "runs" / "swa-lr0.01" / "checkpoints").glob("step-*3")),
        lambda: any((run / "checkpoints").glob("step-*20")),
        lambda: any(path.stat().st_size for path in run.glob("evaluation/*/perplexity.jsonl")),
    ]
    for moment in moments:
        with subprocess.Popen(
            _titans(words(prepared, killed, steps)), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            _until(moment, process)
            process.kill()
        assert not Records(killed / "records").names("swa-s0") or moment is moments[-1]
    assert set(Records(killed / "records").read(WHOLE)["measured"]) < {"text", "long"}, "killed in the middle"
    subprocess.run(_titans(words(prepared, killed, steps)), env=ENVIRONMENT, check=True, capture_output=True)
    assert (killed / "table1.md").read_text() == (undisturbed / "table1.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_trains_in_several_processes(prepared, tmp_path):
    more = [*words(prepared, tmp_path, 10), "--ranks", "2", "train.micro_batch=2"]
    subprocess.run(_titans(more), env=ENVIRONMENT, check=True, capture_output=True)
    assert Records(tmp_path / "records").read(WHOLE)["trained"]["steps"] == 10
    assert "2 data ranks" in (tmp_path / "runs" / WHOLE / "log.txt").read_text()


def _titans(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "titans_pt", *arguments]
