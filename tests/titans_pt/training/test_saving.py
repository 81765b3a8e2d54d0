"""Times at which a run saves, and the checkpoint that it continues from."""

import errno
import math
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.trainings import spoil_logits
from titans_pt.config import TrainConfig
from titans_pt.config.files import load_config
from titans_pt.errors import Diverged, UserError
from titans_pt.runs import checkpoints, shards
from titans_pt.runs.metrics import read_metrics
from titans_pt.training import loop
from titans_pt.training.saving import spare_folder

pytestmark = pytest.mark.usefixtures("one_group")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, prepared, one_group):
    """(config file, run folder) of a run of 20 steps with checkpoints 10, 15, 20. Copy before changing it."""
    import yaml

    from tests.conftest import TINY, merged

    folder = tmp_path_factory.mktemp("healthy")
    top = {
        "run": {"dir": str(folder / "run")},
        "data": {"dir": str(prepared), "sources": [{"kind": "files", "path": str(prepared.parent / "text.jsonl")}]},
        "train": {"max_steps": 60, "checkpoint_every": 5},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(merged(TINY, top)))
    assert loop.train(load_config(folder / "config.yaml", ["train.stop_at=20"])) == 0
    return folder / "config.yaml", folder / "run"


@pytest.fixture
def run(healthy, tmp_path):
    """A copy of the healthy run: ``run(overrides)`` continues it; also ``run.folder`` and ``run.steps()``."""
    config, folder = healthy
    shutil.copytree(folder, tmp_path / "run")

    def go_on(*overrides: str) -> int:
        return loop.train(load_config(config, [f"run.dir={tmp_path / 'run'}", *overrides]))

    go_on.folder = tmp_path / "run"
    go_on.steps = lambda: steps(go_on.folder)
    return go_on


def steps(folder: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(folder / "checkpoints")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.thorough
def test_a_divergence_leaves_the_healthy_checkpoints(run):
    """A launcher such as torchrun would start the run again and again."""
    before = contents(run.folder / "checkpoints")
    assert run.steps() == [10, 15, 20]
    for _ in range(2):
        with pytest.raises(Diverged, match=r"the last 10 steps \(to \d+\) .* steps with a checkpoint: 10, 15, 20"):
            run("train.lr=1e3")
        assert re.search(r"the last 10 steps \(to \d+\) .*: 10, 15, 20", (run.folder / "diverged.txt").read_text())
        assert contents(run.folder / "checkpoints") == before
    assert run("train.resume=15", "train.stop_at=17") == 0
    assert run.steps() == [10, 15, 17]
    assert not (run.folder / "diverged.txt").exists()


@pytest.fixture
def spoilt(monkeypatch):
    """Steps of a run in which the logits are NaN."""
    return spoil_logits(monkeypatch, math.nan)


def test_a_checkpoint_that_is_due_at_a_nonfinite_step_is_taken_after_the_next_finite_one(tiny, tmp_path, spoilt):
    spoilt.update({4, 5})
    config = load_config(tiny(train={"checkpoint_every": 4, "max_nonfinite": 3}))
    assert loop.train(config) == 0
    assert steps(tmp_path / "run") == [6, 8, 10]
    assert checkpoints.read_state(checkpoints.find(tmp_path / "run" / "checkpoints", 6)).adam_step == 4


def test_a_run_whose_last_steps_are_not_finite_says_where_to_end_it(tiny, tmp_path, spoilt):
    spoilt.update({9, 10})
    with pytest.raises(Diverged, match=r"the last 2 steps \(to 10\) .* 4, 8\. train.stop_at=8 ends with a checkpoint"):
        loop.train(load_config(tiny(train={"checkpoint_every": 4})))
    assert steps(tmp_path / "run") == [4, 8]


@pytest.mark.parametrize(("first", "kept", "remedy"), [
    (1, [], "and run the command again, which then starts from scratch"),
    (7, [4], "and continue from a healthy checkpoint: train.resume=4 or an earlier one"),
])  # fmt: skip
def test_the_remedy_names_a_checkpoint_that_exists(tiny, tmp_path, spoilt, first, kept, remedy):
    spoilt.update(range(first, first + 3))
    with pytest.raises(Diverged, match=remedy):
        loop.train(load_config(tiny(train={"checkpoint_every": 4, "max_nonfinite": 3})))
    assert steps(tmp_path / "run") == kept


def test_a_signal_in_the_midst_of_nonfinite_steps_saves_nothing(tiny, tmp_path, spoilt, monkeypatch, capsys):
    spoilt.add(6)
    monkeypatch.setattr(loop.StopSignals, "decide", lambda self, sums: 15 * (len(metrics()) == 6))

    def metrics():
        return read_metrics(tmp_path / "run" / "metrics.jsonl")

    assert loop.train(load_config(tiny(train={"checkpoint_every": 4}))) == 143
    assert steps(tmp_path / "run") == [4]
    out = capsys.readouterr().out
    assert "stopped by signal 15 at step 6; checkpoint" in out
    assert "step-00000004 (step 6 was not finite and is not saved)" in out


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


def test_a_step_chooses_the_checkpoint_and_later_ones_are_set_aside(run, caplog):
    straight = losses(run.folder)
    before = contents(run.folder / "checkpoints" / "step-00000020")
    weights = checkpoints.read_weights(run.folder / "checkpoints/step-00000020")
    assert run("train.resume=10", "train.stop_at=20", "train.keep_last=9") == 0
    assert losses(run.folder) == straight
    aside = run.folder / "checkpoints" / "set-aside"
    assert sorted(path.name for path in aside.iterdir()) == ["step-00000015", "step-00000020"]
    assert contents(aside / "step-00000020") == before
    assert f"continues at step 10; a later checkpoint is now {aside / 'step-00000015'}" in caplog.text
    assert load_config(run.folder / "config.yaml").train.resume == "auto", "its own config.yaml goes on from there"
    again = checkpoints.read_weights(run.folder / "checkpoints/step-00000020")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_the_same_command_continues_what_it_has_done_and_another_one_goes_back(run):
    command = ["train.resume=10", "train.lr=2e-2"]
    log = run.folder / "log.txt"
    for at, overrides in ((10, [*command, "train.stop_at=16"]), (16, [*command, "train.stop_at=16"]),
                          (10, ["train.resume=10", "train.lr=3e-2", "train.stop_at=16"]),
                          (16, ["train.lr=3e-2", "train.stop_at=17"])):  # fmt: skip
        assert run(*overrides) == 0
        assert [line for line in log.read_text().splitlines() if "resuming at" in line][-1].split()[6] == f"{at}:"
    aside = run.folder / "checkpoints" / "set-aside"
    assert sorted(path.name for path in aside.iterdir()) == [
        "step-00000015",
        "step-00000015-2",
        "step-00000016",
        "step-00000020",
    ]


def test_a_step_without_a_checkpoint_names_those_that_exist(run):
    before = contents(run.folder / "checkpoints")
    with pytest.raises(UserError, match=r"^train\.resume: given 17; .*no such checkpoint; existing steps: 10, 15, 20$"):
        run("train.resume=17")
    assert contents(run.folder / "checkpoints") == before


@pytest.mark.parametrize(("words", "message"), [
    (["perplexity.text=/nowhere"], r"^evaluation.perplexity.text: /nowhere holds no token files; make them with"),
    (["caching.segment=5"], r"^evaluation.caching.segment: given 5; must be a multiple of the run's"),
    (["suites=[babilong]", "babilong.haystack.kind=files", "babilong.haystack.path=/nowhere"],
     r"^evaluation.babilong.haystack: path='/nowhere': no such file"),
])  # fmt: skip
def test_an_evaluation_that_cannot_work_is_told_before_the_first_step(tiny, tmp_path, words, message):
    usual = ["every=1", "suites=[perplexity]", "caching.shares=average", "caching.segment=8"]
    config = load_config(tiny(), ["model.mixers=[lmm]", *(f"evaluation.{word}" for word in (*usual, *words))])
    with pytest.raises(UserError, match=message):
        loop.train(config)
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.fixture
def full(monkeypatch):
    """``full(name, at)``: writing a file of that name fails from its at-th time on, but not under a folder "spare"."""

    def no_space(path):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def fill(name: str, at: int):
        write, save, count = loop.MetricsLog.write, checkpoints.save_tensors, [0]

        def write_or_fail(self, kind, step, **values):
            if name == "metrics" and step >= at:
                raise no_space(self.path)
            write(self, kind, step, **values)

        def save_or_fail(tensors, path):
            count[0] += path.name == checkpoints.MODEL
            if name == "checkpoint" and count[0] >= at and "spare" not in path.parts:
                raise no_space(path)
            save(tensors, path)

        monkeypatch.setattr(loop.MetricsLog, "write", write_or_fail)
        monkeypatch.setattr(checkpoints, "save_tensors", save_or_fail)

    return fill


@pytest.mark.parametrize(("what", "at", "file"), [
    ("metrics", 5, "metrics.jsonl"), ("checkpoint", 2, "checkpoints/.step-00000004.tmp/model.safetensors"),
])  # fmt: skip
def test_a_full_disk_is_named_and_a_last_checkpoint_goes_elsewhere(tiny, tmp_path, full, what, at, file, caplog):
    full(what, at)
    path = tiny(train={"checkpoint_every": 2})
    with pytest.raises(OSError) as error:
        loop.train(load_config(path, [f"run.spare_dir={tmp_path / 'spare'}"]))
    assert error.value.filename == f"{tmp_path}/run/{file}"
    (last,) = checkpoints.list_checkpoints(spare_folder(tmp_path / "spare", tmp_path / "run"))
    assert checkpoints.step_of(last) >= 4
    assert checkpoints.verify(last) == []
    assert f"run.spare_dir: {last} is the last checkpoint; once there is space, move it to" in caplog.text
    assert checkpoints.step_of(last) > min(steps(tmp_path / "run"))


def test_what_a_crash_left_is_gone_before_shards_are_written(tiny, tmp_path):
    left = tmp_path / "run/checkpoints/.step-00000002.tmp"
    left.mkdir(parents=True)
    (left / shards.shard_file(1)).write_bytes(b"old")
    overrides = ["train.resume=never", "train.checkpoint_shards=true", "train.stop_at=2"]
    assert loop.train(load_config(tiny(), overrides)) == 0
    (path,) = checkpoints.list_checkpoints(tmp_path / "run/checkpoints")
    assert checkpoints.verify(path) == []
    assert not (path / shards.shard_file(1)).exists()


def test_a_shard_that_cannot_be_written_ends_the_run_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    save, count = shards.save_tensors, []

    def full(pieces, path):
        count.append(path)
        if len(count) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(pieces, path)

    monkeypatch.setattr(shards, "save_tensors", full)
    path = tiny(train={"checkpoint_every": 2, "checkpoint_shards": True})
    with pytest.raises(OSError) as error:
        loop.train(load_config(path, [f"run.spare_dir={tmp_path / 'spare'}"]))
    assert error.value.filename == f"{tmp_path}/run/checkpoints/.step-00000004.tmp/shard-00000.safetensors"
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    (last,) = checkpoints.list_checkpoints(spare_folder(tmp_path / "spare", tmp_path / "run"))
    assert checkpoints.verify(last) == []


def test_runs_that_share_a_spare_disk_keep_their_checkpoints_apart(tmp_path, monkeypatch):
    folders = {spare_folder("/spare", Path(run)) for run in ("/a/run", "/b/run", "/a/other")}
    assert len(folders) == 3
    monkeypatch.chdir(tmp_path)
    assert spare_folder("/spare", Path("run")) == spare_folder("/spare", tmp_path / "run")


def test_a_spare_disk_that_is_full_too(tiny, tmp_path, full, caplog, monkeypatch):
    full("checkpoint", 1)
    monkeypatch.setattr(loop, "check_room", lambda *_, **__: (tmp_path / "file").touch())  # unusable after the check
    with pytest.raises(OSError) as error:
        loop.train(load_config(tiny(train={"checkpoint_every": 2}), [f"run.spare_dir={tmp_path / 'file'}"]))
    assert error.value.filename.startswith(str(tmp_path / "run"))
    assert "run.spare_dir: it cannot be written to, either" in caplog.text


def test_a_spare_disk_that_cannot_be_used_is_told_before_the_first_step(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run.spare_dir: .*file cannot be written to \(it is no folder\)"):
        loop.train(load_config(tiny(), [f"run.spare_dir={tmp_path / 'file'}"]))
    assert not (tmp_path / "run").exists()


def test_a_full_disk_without_a_spare_one_ends_the_run(tiny, tmp_path, full):
    full("metrics", 5)
    with pytest.raises(OSError, match="No space left"):
        loop.train(load_config(tiny(train={"checkpoint_every": 2})))
    assert steps(tmp_path / "run") == [2, 4]


def test_what_fails_before_the_first_step_leaves_the_run_as_it_was(run, monkeypatch):
    """train.resume=STEP: neither checkpoints nor curves move until the new branch is ready to begin."""
    before, curve = run.steps(), losses(run.folder)
    with monkeypatch.context() as broken:
        broken.setattr(loop, "build_engine", lambda *_: (_ for _ in ()).throw(UserError("no memory left")))
        with pytest.raises(UserError, match="no memory left"):
            run("train.resume=10", "train.stop_at=12")
    assert run.steps() == before and losses(run.folder) == curve
    assert run("train.resume=10", "train.stop_at=12") == 0
    assert run.steps() == [10, 12]
    assert (run.folder / "metrics.before-10.jsonl").exists()


def test_never_refuses_another_command_and_continues_the_same_one(tiny, tmp_path, monkeypatch):
    """A launcher starts a command again after a lost process."""
    path, words = tiny(train={"checkpoint_every": 2}), ["train.resume=never", "train.max_steps=6"]
    with monkeypatch.context() as stopped:
        stopped.setattr(loop.StopSignals, "decide", lambda self, sums: 15)
        assert loop.train(load_config(path, words)) == 128 + 15
    assert steps(tmp_path / "run") == [1]
    with pytest.raises(UserError, match="given 'never', but .* holds checkpoints up to step-00000001"):
        loop.train(load_config(path, [*words, "train.lr=1e-4"]))
    assert loop.train(load_config(path, words)) == 0
    assert steps(tmp_path / "run")[-1] == 6


def test_damaged_checkpoints_do_not_count_among_the_newest(run):
    """A run that continues from before damaged checkpoints keeps as many undamaged ones as it was told to."""
    (run.folder / "checkpoints/step-00000020/model.safetensors").write_bytes(b"")
    assert run("train.stop_at=17", "train.keep_last=2") == 0
    assert run.steps() == [15, 17, 20]
    assert run("train.stop_at=21", "train.keep_last=2") == 0
    assert run.steps() == [20, 21] and not checkpoints.verify(run.folder / "checkpoints/step-00000020")


def test_ranks_of_data_draw_numbers_of_their_own():
    def drawn(rank: int, step: int) -> int:
        """The seed of a step of one rank."""
        engine = SimpleNamespace(set_lr=lambda lr: None, backbone=SimpleNamespace(set_progress=lambda share: None),
                                 topology=SimpleNamespace(data=SimpleNamespace(rank=rank)))  # fmt: skip
        train = TrainConfig(max_steps=10)
        trainer = SimpleNamespace(
            config=SimpleNamespace(train=train, run=SimpleNamespace(seed=3)), step=step - 1, engine=engine,
            last_step=10, task=SimpleNamespace(learning_rate=lambda step, usual: usual),
            spikes=SimpleNamespace(limit=1.0), ranks=SimpleNamespace(device=torch.device("cpu")),
        )  # fmt: skip
        loop.Trainer._begin(trainer)
        return torch.initial_seed()

    assert len({drawn(rank, step) for rank in range(4) for step in (1, 2, 3)}) == 12
    assert drawn(0, 2) == 3 * 1_000_003 + 2, "that of a run of one rank"


def test_a_validation_after_a_stop_is_one_of_its_step(tiny, tmp_path, monkeypatch):
    """Settings that change during training (here TTT's warm-up of its steps) are restored."""
    model = {"mixers": ["ttt_linear"], "ttt_linear": {"base_lr_warmup": 0.9, "mini_batch": 4}}
    path = tiny(model=model, train={"max_steps": 6, "eval_every": 3, "checkpoint_every": 6, "lr": 0.05})
    found = {}
    for name, stops in (("whole", iter([])), ("parts", iter([0, 0, 15]))):
        with monkeypatch.context() as stopped:
            stopped.setattr(loop.StopSignals, "decide", lambda self, sums, stops=stops: next(stops, 0))
            status = loop.train(load_config(path, [f"run.dir={tmp_path / name}"]))
            if name == "parts":
                assert status == 143 and loop.train(load_config(path, [f"run.dir={tmp_path / name}"])) == 0
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        found[name] = [(row["step"], row["validation_loss"]) for row in rows if row["kind"] == "validation"]
    assert found["whole"] == found["parts"] and [step for step, _ in found["whole"]] == [3, 6]


def test_a_validation_that_fails_loses_no_step(run, monkeypatch):
    def fails(trainer):
        raise MemoryError

    monkeypatch.setattr(loop.Trainer, "_validate", fails)
    with pytest.raises(MemoryError):
        run("train.eval_every=25", "train.checkpoint_every=25", "train.keep_last=1")
    assert run.steps() == [25]


def test_the_first_step_of_a_process_which_compiles_does_not_count_for_the_speed(run, monkeypatch):
    ends = iter([0, 300, 300, 301, 301, 303, 303, 307])  # begin and end of each step, seconds
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(ends), monotonic=time.monotonic))
    assert run("train.log_every=2", "train.eval_every=0", "train.stop_at=24") == 0
    speeds = [record["tokens_per_second"] for record in read_metrics(run.folder / "metrics.jsonl")
              if record["kind"] == "train" and record["step"] > 20]  # fmt: skip
    tokens = checkpoints.read_state(run.folder / "checkpoints/step-00000024").config["train"]["batch_tokens"]
    assert speeds == [tokens / 1, 2 * tokens / 6]


def test_ranks_get_the_last_records_of_a_resumed_run_alone(tiny, monkeypatch):
    """A long run has hundreds of thousands of records, and a node has several ranks."""
    config = tiny(train={"max_steps": 4, "log_every": 1, "eval_every": 1, "stop_at": 3})
    loop.train(load_config(config))
    told, catch_up = [], loop.Trainer._catch_up
    monkeypatch.setattr(loop.Trainer, "_catch_up", lambda run, records: told.extend(records) or catch_up(run, records))
    loop.train(load_config(config, ["train.stop_at=null"]))
    assert [(record["kind"], record["step"]) for record in told] == [("train", 3), ("validation", 3)]
