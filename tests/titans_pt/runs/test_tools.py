import errno
import os
import resource
import shutil
from dataclasses import replace
from itertools import count

import pytest
import torch

from tests.helpers.untrained import untrained_run
from tests.titans_pt.runs.test_checkpoints import MOMENTS, STATE, WEIGHTS
from titans_pt import cli
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import load_run


@pytest.fixture
def run(tmp_path):
    for step in (2, 4, 6, 8):
        state = replace(STATE, step=step, topology={"ranks": 4, "tensor": 2})
        checkpoints.save(tmp_path / "checkpoints", WEIGHTS, MOMENTS, state)
    return tmp_path


def test_list(run, capsys):
    (run / "checkpoints/step-00000004/trainer.json").unlink()
    assert cli.run(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "step 2, 20 samples, 0.0 MiB, format 1, ranks 4, tensor 2" in lines[0]
    assert "incomplete or damaged" in lines[1]


def test_verify(run, capsys):
    assert cli.run(["checkpoint", "verify", str(run)]) == 0
    path = run / "checkpoints/step-00000006/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.run(["checkpoint", "verify", str(run)]) == 2
    out, err = capsys.readouterr()
    assert [line.rpartition(": ")[2] for line in out.splitlines()[:4]] == ["complete"] * 4
    assert "step-00000006: model.safetensors: " in out
    assert "1 of 4 checkpoints are damaged" in err


def test_verify_names_what_cannot_be_read(run, monkeypatch, capsys):
    def verify(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "manifest.json"))

    monkeypatch.setattr(checkpoints, "verify", verify)
    assert cli.run(["checkpoint", "verify", str(run)]) == 2
    out, err = capsys.readouterr()
    assert f"Permission denied: '{run}/checkpoints/step-00000002/manifest.json'" in out
    assert "4 of 4 checkpoints are damaged" in err


def test_what_the_training_deletes_meanwhile_is_not_damaged(run, monkeypatch, capsys):
    read, found = checkpoints.verify, checkpoints.list_checkpoints

    def verify(path):
        shutil.rmtree(run / "checkpoints/step-00000004", ignore_errors=True)
        return read(path)

    monkeypatch.setattr(checkpoints, "verify", verify)
    assert cli.run(["checkpoint", "verify", str(run)]) == 0
    assert "step-00000004: deleted by its training" in capsys.readouterr().out
    stale = found(run / "checkpoints") + [run / "checkpoints/step-00000001"]
    monkeypatch.setattr(checkpoints, "list_checkpoints", lambda folder: stale)
    assert cli.run(["checkpoint", "list", str(run)]) == 0
    assert "step-00000001" not in capsys.readouterr().out


def test_prune(run, capsys):
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "1", "--keep-every", "4"]) == 0
    assert capsys.readouterr().out.count("deleted") == 2
    assert [checkpoints.step_of(p) for p in checkpoints.list_checkpoints(run / "checkpoints")] == [4, 8]
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "0"]) == 2


def test_prune_deletes_links_but_not_what_they_point_to(run, tmp_path_factory, capsys):
    away = tmp_path_factory.mktemp("away") / "kept"
    link, dangling = run / "checkpoints/step-00000002", run / "checkpoints/step-00000001"
    link.rename(away)
    link.symlink_to(away)
    dangling.symlink_to("/not/there")
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "2"]) == 0
    out, err = capsys.readouterr()
    assert f"{link}: deleted (a link; {away} stays)" in out and out.count("deleted") == 3 and not err
    assert checkpoints.verify(away) == []
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_what_cannot_be_deleted_is_an_error(run, monkeypatch, caplog, capsys):
    def refuse(path, *_):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(checkpoints.os, "replace", refuse)
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "2"]) == 2
    out, err = capsys.readouterr()
    assert "deleted" not in out
    assert f"{run}: 2 of 4" not in err and f"{run}: 2 of 2 old checkpoints could not be deleted" in err
    assert caplog.text.count("could not be deleted: Permission denied") == 2


def test_no_run(tmp_path, capsys):
    for action in ("list", "verify", "prune"):
        assert cli.run(["checkpoint", action, str(tmp_path / "none")]) == 2
        assert "holds no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_prune_keeps_the_newest_complete_one(run, capsys):
    for step in (6, 8):
        (run / f"checkpoints/step-0000000{step}/model.safetensors").write_bytes(b"")
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "1"]) == 0
    left = [checkpoints.step_of(p) for p in checkpoints.list_checkpoints(run / "checkpoints")]
    assert left == [4, 6, 8], "damaged ones do not count"
    (run / "checkpoints/step-00000004/manifest.json").unlink()
    assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "1"]) == 2
    assert "none of its 3 checkpoints is complete" in capsys.readouterr().err
    assert len(checkpoints.list_checkpoints(run / "checkpoints")) == 3


def test_checkpoints_that_are_a_file(tmp_path, capsys):
    (tmp_path / "checkpoints").write_bytes(b"")
    for action in ("list", "verify", "prune"):
        assert cli.run(["checkpoint", action, str(tmp_path)]) == 2
        assert "checkpoints: is a file" in capsys.readouterr().err


@pytest.fixture
def several(tmp_path, prepared):
    """A run with checkpoints of steps 1 to 3, whose weights are different draws."""
    for seed, step in ((5, 1), (6, 2), (7, 3)):
        run = untrained_run(tmp_path / "several", prepared, seed=seed)
        path = checkpoints.checkpoint_path(run / "checkpoints", 3)
        state = replace(checkpoints.read_state(path), step=step)
        checkpoints.save(run / "checkpoints", checkpoints.read_weights(path), {}, state)
    return run


def weights_of(run, step):
    return checkpoints.read_weights(checkpoints.checkpoint_path(run / "checkpoints", step))


def test_average(several, tmp_path, capsys):
    """The mean of the newest checkpoints, or of given ones, is a run that can be evaluated and trained from."""
    every = [weights_of(several, step) for step in (1, 2, 3)]
    for words, chosen in [(["--last", "2"], every[1:]), (["--steps", "3,1"], every[::2]), ([], every)]:
        out = tmp_path / f"mean{len(words) and words[1]}"
        assert cli.run(["checkpoint", "average", str(several), "--out", str(out), *words]) == 0
        found = weights_of(out, 3)
        assert found.keys() == every[0].keys()
        for name, mean in found.items():
            expected = torch.stack([each[name].double() for each in chosen]).mean(0)
            assert mean.dtype == torch.float32 and torch.equal(mean, expected.float()), name
    assert f"{out}: the mean of 3 checkpoints, of steps 1, 2, 3" in capsys.readouterr().out
    loaded = load_run(out)
    assert loaded.step == 3 and loaded.config.run.dir == str(out) and loaded.tokenizer.encode("a")
    assert checkpoints.read_state(out / "checkpoints/step-00000003").origin == f"mean of {several} at steps 1, 2, 3"


def test_an_average_beside_a_training_that_deletes_checkpoints(several, tmp_path, monkeypatch, capsys):
    """Reading every byte of a large checkpoint takes minutes, in which the training may delete the one before it."""
    verify = checkpoints.verify

    def slowly(path, content=True):
        found = verify(path, content)
        if content and path.name == "step-00000003":
            checkpoints.delete([path for path in checkpoints.list_checkpoints(path.parent) if path.name[-1] == "1"])
        return found

    monkeypatch.setattr(checkpoints, "verify", slowly)
    assert cli.run(["checkpoint", "average", str(several), "--out", str(tmp_path / "mean")]) == 0
    assert "the mean of 2 checkpoints, of steps 2, 3" in capsys.readouterr().out


def test_what_cannot_be_averaged_is_one_line(several, tmp_path, capsys):
    def said(*words):
        assert cli.run(["checkpoint", "average", str(several), *words]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "mean")
    assert "step-00000009: no such checkpoint; existing steps: 1, 2, 3" in said("--out", out, "--steps", "1,9")
    assert "an average needs two checkpoints, found 1" in said("--out", out, "--steps", "2,2")
    assert "holds a run already; name another folder" in said("--out", str(several))
    (several / "checkpoints/step-00000002/model.safetensors").write_bytes(b"short")
    assert "damaged" in said("--out", out, "--steps", "1,2")
    assert not os.path.lexists(out)
    assert cli.run(["checkpoint", "average", str(several), "--out", out]) == 0
    assert "of steps 1, 3" in capsys.readouterr().out


class Killed(BaseException):
    pass


def kill_at(monkeypatch, name, number):
    """Make call ``number`` of os.``name``, from 1 on, and all later ones raise Killed, as if the process had ended."""
    calls, original = count(1), getattr(os, name)

    def call(*arguments, **more):
        if next(calls) >= number:
            raise Killed
        return original(*arguments, **more)

    monkeypatch.setattr(os, name, call)


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_an_average_that_was_killed_is_made_again(several, tmp_path, monkeypatch, capsys):
    """A folder counts as a run only when it is complete: the same command then makes what an undisturbed one makes."""
    out = tmp_path / "mean"
    words = ["checkpoint", "average", str(several), "--out", str(out)]
    assert cli.run(words) == 0
    whole = content(out)
    for number in count(1):
        shutil.rmtree(out)
        with monkeypatch.context() as patch:
            kill_at(patch, "replace", number)
            try:
                cli.run(words)
            except Killed:
                assert not (out / "config.yaml").exists()
            else:
                break
        assert cli.run(words) == 0, capsys.readouterr().err
        assert content(out) == whole
    assert number > 4


def test_two_processes_do_not_write_one_run(several, tmp_path, capsys):
    """Their files would be mixed in one checkpoint, which its manifest then calls damaged."""
    out = tmp_path / "mean"
    with RunFolder(out).lock():
        assert cli.run(["checkpoint", "average", str(several), "--out", str(out)]) == 2
    assert f"--out: {out} is in use by another run (process {os.getpid()} on" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [".lock"]


@pytest.mark.parametrize("words", [["prune", "--keep-last", "2"], ["merge"]])
def test_what_a_killed_process_left_is_removed(run, words, monkeypatch):
    """A process that was killed while it deleted or wrote a checkpoint left hidden folders as large as checkpoints."""
    with monkeypatch.context() as patch:
        kill_at(patch, "rmdir", 1)
        with pytest.raises(Killed):
            checkpoints.delete(checkpoints.outdated(run / "checkpoints", 3))
    (run / "checkpoints/.step-00000009.tmp").mkdir()
    assert {path.name for path in (run / "checkpoints").glob(".*")} == {".step-00000002.old", ".step-00000009.tmp"}
    assert cli.run(["checkpoint", words[0], str(run), *words[1:]]) == 0
    assert not list((run / "checkpoints").glob(".*"))


def test_a_merge_that_was_killed_between_its_renames_finds_its_checkpoint_again(run):
    """The newest checkpoint then has a hidden name; an older one must not be merged in its place."""
    path = run / "checkpoints/step-00000008"
    path.rename(path.with_name(".step-00000008.old"))
    path.with_name(".step-00000008.tmp").mkdir()
    assert cli.run(["checkpoint", "merge", str(run)]) == 0
    assert checkpoints.verify(path) == [] and not list(path.parent.glob(".*"))


def test_a_failing_disk_is_one_line(several, tmp_path, monkeypatch, capsys):
    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    out = tmp_path / "mean"
    assert cli.run(["checkpoint", "average", str(several), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert f"titans: error: {out}/checkpoints/.step-00000003.tmp/" in error and "Input/output error; its disk" in error


def test_prune_frees_a_full_disk(run, capsys):
    """No byte can be written there, not even the name of the process that holds the run's lock."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert cli.run(["checkpoint", "prune", str(run), "--keep-last", "1"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().out.count("deleted") == 3
