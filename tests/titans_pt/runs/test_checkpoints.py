import errno
import io
import json
import os
import resource
from dataclasses import dataclass, replace

import pytest
import torch

from titans_pt.errors import UserError
from titans_pt.runs import checkpoints, tools
from titans_pt.runs.checkpoints import TrainerState

WEIGHTS = {"a.weight": torch.tensor([[1.0, -0.0], [float("inf"), 1e-45]]), "b": torch.randn(3)}
MOMENTS = {f"{key}.{name}": torch.randn_like(w) for key in ("exp_avg", "exp_avg_sq") for name, w in WEIGHTS.items()}
STATE = TrainerState(
    step=5, samples=20, adam_step=4, nonfinite=1, nonfinite_in_a_row=0,
    config={"model": {}}, identity={"tokenizer": "t", "data": "d"}, first_loss=5.5,
)  # fmt: skip


def save(folder, step=5):
    return checkpoints.save(folder, WEIGHTS, MOMENTS, replace(STATE, step=step))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def bits(tensor):
    return tensor.view(torch.int32)


def test_round_trip_is_exact_to_the_bit(tmp_path):
    path = save(tmp_path)
    assert path.name == "step-00000005"
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]
    assert checkpoints.verify(path) == []
    assert checkpoints.read_state(path) == STATE
    found = checkpoints.read_weights(path)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(bits(found[name]), bits(WEIGHTS[name])) for name in WEIGHTS)
    with checkpoints.Tensors(path) as tensors:
        for key, moment in MOMENTS.items():
            assert torch.equal(tensors.get(*key.split(".", 1)), moment)


@dataclass(frozen=True)
class LaterState(TrainerState):
    pace: float = 1.0


def test_a_checkpoint_of_a_later_version_is_one_line(tmp_path, capsys):
    later = LaterState(**vars(STATE))
    path = checkpoints.save(tmp_path / "checkpoints", WEIGHTS, MOMENTS, later)
    with pytest.raises(UserError, match="trainer.json: has pace, which this version does not know; use the version"):
        checkpoints.read_state(path)
    tools.list_run(str(tmp_path))
    assert capsys.readouterr().out.startswith(f"{path}/trainer.json: has pace, ")


def test_hashes_that_earlier_versions_wrote_do_not_matter(tmp_path):
    file = save(tmp_path) / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_hash": "m", "config_hash": "c"}))
    assert checkpoints.read_state(file.parent) == STATE


def test_the_state_of_version_0_1_0(tmp_path):
    path = save(tmp_path)
    tree = json.loads((path / "trainer.json").read_text())
    del tree["identity"]
    (path / "trainer.json").write_text(json.dumps(tree | {"tokenizer_sha256": "t", "data_fingerprint": "d"}))
    assert checkpoints.read_state(path) == STATE


def test_what_a_killed_process_set_aside_is_in_nobodys_way(tmp_path):
    aside = tmp_path / ".step-00000005.old"
    for action in (save, lambda folder: checkpoints.delete([folder / "step-00000005"])):
        save(tmp_path)
        aside.mkdir(exist_ok=True)
        (aside / "model.safetensors").touch()
        action(tmp_path)
        assert not aside.exists()
    assert not names(tmp_path)


def test_steps_are_listed_in_order_and_found(tmp_path):
    for step in (100_000_000, 5, 20):
        save(tmp_path, step)
    (tmp_path / "notes").mkdir()
    assert [p.name for p in checkpoints.list_checkpoints(tmp_path)] == [
        "step-00000005",
        "step-00000020",
        "step-100000000",
    ]
    assert checkpoints.find(tmp_path).name == "step-100000000"
    assert checkpoints.find(tmp_path, 20).name == "step-00000020"
    with pytest.raises(UserError, match="no such checkpoint; existing steps: 5, 20, 100000000"):
        checkpoints.find(tmp_path, 6)


def test_no_checkpoints_at_all(tmp_path):
    assert checkpoints.newest_complete(tmp_path / "missing") is None
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        checkpoints.find(tmp_path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def nest(path):
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, nest, os.remove])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, caplog, file, damage):
    good, bad = save(tmp_path, 5), save(tmp_path, 6)
    if file == "manifest.json" and damage is flip:
        (bad / file).write_text("{")
    elif file == "manifest.json" and damage is truncate:
        (bad / file).write_text(json.dumps({"format": 99, "files": {}}))
    else:
        damage(bad / file)
    assert file in checkpoints.verify(bad)[0]
    assert checkpoints.newest_complete(tmp_path) == good
    assert str(bad) in caplog.text
    assert bad.exists()
    with pytest.raises(UserError, match="damaged"):
        checkpoints.find(tmp_path, 6)


@pytest.mark.parametrize(("files", "problem"), [
    ({}, "manifest.json: does not list model.safetensors, optimizer.safetensors, trainer.json"),
    ({"model.safetensors": {}}, "manifest.json: cannot be read ('bytes')"),
])  # fmt: skip
def test_a_manifest_that_lists_no_files_is_one_problem(tmp_path, files, problem):
    path = save(tmp_path)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 5, "files": files}))
    assert checkpoints.verify(path) == [problem]
    with pytest.raises(UserError, match="step-00000005: damaged: manifest.json"):
        checkpoints.find(tmp_path, 5)


def test_all_damaged_is_the_users_decision(tmp_path):
    truncate(save(tmp_path, 5) / "model.safetensors")
    os.remove(save(tmp_path, 6) / "manifest.json")
    with pytest.raises(UserError, match="none of its 2 checkpoints is complete.*step-00000006: manifest.json: missing"):
        checkpoints.newest_complete(tmp_path)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch, code, name):
    """No older checkpoint takes its place, and nobody is told to delete it; once it can be read, all is as before."""
    save(tmp_path, 5)
    newest, opened = save(tmp_path, 6), io.open

    def refused(path, *arguments, **more):
        if path == newest / name:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr("io.open", refused)
        with pytest.raises(OSError) as error:
            checkpoints.newest_complete(tmp_path)
        assert (error.value.errno, error.value.filename) == (code, str(newest / name))
        if name == "manifest.json":
            assert checkpoints.outdated(tmp_path, 1) == [], "it does not count among the newest, and stays"
    assert checkpoints.newest_complete(tmp_path) == newest


def test_too_many_open_files_are_no_missing_file(tmp_path):
    path = save(tmp_path, 5)
    before, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(OSError) as error, checkpoints.Tensors(path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (error.value.errno, error.value.filename) == (errno.EMFILE, str(path / "model.safetensors"))


def test_a_broken_part_of_a_disk_is_damage(tmp_path, monkeypatch, caplog):
    old, newest = save(tmp_path, 5), save(tmp_path, 6)

    def broken(path):
        if path == newest / "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return path.read_text()

    monkeypatch.setattr(checkpoints, "_text", broken)
    assert checkpoints.newest_complete(tmp_path) == old
    assert "step-00000006 is damaged and skipped: manifest.json: cannot be read" in caplog.text


@pytest.mark.parametrize("where", ["save_tensors", "_write_json", "flush_to_disk"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_earlier_ones_and_no_rubbish(tmp_path, monkeypatch, where, code):
    good = save(tmp_path, 5)
    before = {path.name: path.read_bytes() for path in good.iterdir()}

    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoints, where, full)
    with pytest.raises(OSError):
        save(tmp_path, 6)
    assert names(tmp_path) == ["step-00000005"]
    assert {path.name: path.read_bytes() for path in good.iterdir()} == before


def test_an_error_is_what_the_disk_said(tmp_path):
    with pytest.raises(OSError) as error:
        checkpoints.save_tensors(WEIGHTS, tmp_path / "missing" / "model.safetensors")
    assert error.value.errno == errno.ENOENT


def test_a_crash_between_writing_and_renaming_is_not_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def crash(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        patch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            save(tmp_path, 6)
    assert names(tmp_path) == [".step-00000006.tmp", "step-00000005"]
    assert checkpoints.newest_complete(tmp_path).name == "step-00000005"
    checkpoints.clean(tmp_path)
    assert names(tmp_path) == ["step-00000005"]
    assert save(tmp_path, 6).is_dir()


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    path = save(tmp_path)
    truncate(path / "model.safetensors")
    assert checkpoints.verify(save(tmp_path)) == []


def fails_on(name, error):
    """An os.replace that raises ``error`` where a file or folder would get ``name``."""
    replace_ = os.replace

    def rename(source, target):
        if os.path.basename(target) == name and os.path.basename(source).endswith(".tmp"):
            raise error
        replace_(source, target)

    return rename


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), SystemExit()])
def test_what_is_to_be_replaced_stays_when_the_new_one_cannot_take_its_name(tmp_path, monkeypatch, error):
    path = save(tmp_path)
    before = checkpoints.checkpoint_hash(path)
    monkeypatch.setattr(os, "replace", fails_on(path.name, error))
    with pytest.raises(type(error)):
        checkpoints.save(tmp_path, WEIGHTS, {}, STATE)
    assert names(tmp_path) == [path.name]
    assert checkpoints.checkpoint_hash(path) == before


def test_what_was_to_be_replaced_gets_its_name_back_after_a_crash(tmp_path):
    path = save(tmp_path)
    before = checkpoints.checkpoint_hash(path)
    os.replace(path, tmp_path / f".{path.name}.old")
    (tmp_path / f".{path.name}.tmp").mkdir()
    checkpoints.clean(tmp_path)
    assert names(tmp_path) == [path.name]
    assert checkpoints.checkpoint_hash(path) == before


def test_a_deletion_that_a_crash_cut_short_is_finished(tmp_path):
    path = save(tmp_path)
    os.replace(path, tmp_path / f".{path.name}.old")
    checkpoints.clean(tmp_path)
    assert names(tmp_path) == []


def test_only_what_has_a_checkpoints_name_and_manifest_is_one(tmp_path):
    path = save(tmp_path)
    assert checkpoints.is_checkpoint(path)
    copy = path.rename(tmp_path / f"{path.name}-2")
    assert not checkpoints.is_checkpoint(copy)
    path.mkdir()
    assert not checkpoints.is_checkpoint(path)


def test_a_checkpoint_takes_the_place_of_a_link_and_a_link_can_be_set_aside(tmp_path):
    (tmp_path / "run").mkdir()
    for step in (5, 6):
        save(tmp_path / "away", step)
        name = checkpoints.checkpoint_path(tmp_path, step).name
        (tmp_path / "run" / name).symlink_to(f"../away/{name}")
    path = save(tmp_path / "run", 5)
    assert not path.is_symlink() and checkpoints.verify(path) == []
    (place,) = checkpoints.set_aside(tmp_path / "run", 5)
    assert place.is_symlink() and checkpoints.verify(place) == []
    assert names(tmp_path / "away") == ["step-00000005", "step-00000006"]


def test_prune_keeps_the_newest_and_never_the_one_just_written(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    just_written = checkpoints.checkpoint_path(tmp_path, 1)
    checkpoints.delete(checkpoints.outdated(tmp_path, 2, keep=[just_written]))
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def test_prune_looks_at_the_newest_alone(tmp_path, monkeypatch):
    """A run with train.keep_every keeps hundreds, each with the files of a thousand ranks."""
    for step in range(1, 8):
        save(tmp_path, step)
    looked, verify = [], checkpoints.verify
    monkeypatch.setattr(checkpoints, "verify", lambda path, **more: looked.append(path.name) or verify(path, **more))
    assert [checkpoints.step_of(path) for path in checkpoints.outdated(tmp_path, 2, keep_every=2)] == [1, 3, 5]
    assert looked == ["step-00000007", "step-00000006"]


def test_prune_keeps_every_so_manieth_for_good(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step)
    gone = checkpoints.delete(checkpoints.outdated(tmp_path, 1, keep_every=3))
    assert [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(tmp_path)] == [3, 6, 7]
    assert [checkpoints.step_of(path) for path in gone] == [1, 2, 4, 5]


def test_incomplete_checkpoints_do_not_count_among_the_newest_that_prune_keeps(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    truncate(tmp_path / "step-00000003/optimizer.safetensors")
    (tmp_path / "step-00000004/manifest.json").unlink()  # a deletion by hand, cut short
    checkpoints.delete(checkpoints.outdated(tmp_path, 2))
    assert [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(tmp_path)] == [2, 3, 4, 5]
    checkpoints.delete(checkpoints.outdated(tmp_path, 1))
    assert names(tmp_path) == ["step-00000005"]
    truncate(tmp_path / "step-00000005/model.safetensors")
    assert checkpoints.outdated(tmp_path, 1) == []


def test_checkpoints_on_a_disk_that_is_not_mounted_are_not_the_same_as_none(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    with pytest.raises(UserError, match=f"a link to {tmp_path}/scratch, which does not exist here; bring it back"):
        checkpoints.newest_complete(tmp_path / "checkpoints")
    (tmp_path / "scratch").mkdir()
    assert checkpoints.newest_complete(tmp_path / "checkpoints") is None


def test_a_training_that_deletes_what_another_process_reads(tmp_path, monkeypatch, caplog):
    """Not an older checkpoint that is kept for good takes its place, but a newer one."""
    save(tmp_path, 10)
    read, write, hidden = checkpoints.verify, save, tmp_path / ".old"
    save(tmp_path, 11)

    def verify(path):
        if path.name == "step-00000011":  # meanwhile the training writes step 12 and deletes step 11
            write(tmp_path, 12)
            os.replace(path, hidden)
        return read(path)

    monkeypatch.setattr(checkpoints, "verify", verify)
    assert checkpoints.newest_complete(tmp_path).name == "step-00000012"
    assert not caplog.text


def test_a_checkpoint_that_vanishes_while_it_is_read_is_looked_for_again(tmp_path):
    save(tmp_path, 1)
    calls = []

    def weights():
        path = checkpoints.find(tmp_path)
        calls.append(path.name)
        if len(calls) == 1:
            save(tmp_path, 2)
            checkpoints.delete(checkpoints.outdated(tmp_path, 1))
        return checkpoints.read_weights(path)

    assert checkpoints.undisturbed(tmp_path, weights).keys() == WEIGHTS.keys()
    assert calls == ["step-00000001", "step-00000002"]
    with pytest.raises(UserError, match="no such checkpoint; existing steps: 2"):
        checkpoints.undisturbed(tmp_path, lambda: checkpoints.find(tmp_path, 1))


def test_the_hash_is_that_of_the_content(tmp_path):
    a, b = save(tmp_path / "a"), save(tmp_path / "b")
    assert checkpoints.checkpoint_hash(a) == checkpoints.checkpoint_hash(b)
    assert checkpoints.checkpoint_hash(save(tmp_path / "c", 6)) != checkpoints.checkpoint_hash(a)
