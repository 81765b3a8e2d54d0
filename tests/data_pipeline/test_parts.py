"""Preparing with many processes, killed at any point, gives the same files as one undisturbed process."""

import importlib
import json
import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.data_pipeline.small_corpus import make_texts, write_jsonl
from titans_pt.data_pipeline import TokenFiles, parts, sources
from titans_pt.data_pipeline.manifest import read_manifest
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.errors import Unreachable, UserError

module = importlib.import_module("titans_pt.data_pipeline.prepare")


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 3000)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture
def many(config, tmp_path, small_parts):
    """``many(name)``: a config whose sources have many parts, several files and duplicates; writes to tmp_path/name."""
    (tmp_path / "text").mkdir()
    texts = make_texts(300)
    for i in range(3):
        write_jsonl(tmp_path / "text" / f"{i}.jsonl", texts[100 * i : 100 * i + 100] + texts[:7] + ["", " "])

    def build(name, **more):
        source = {"kind": "files", "path": str(tmp_path / "text")}
        return config(data={"dir": str(tmp_path / name), "sources": [source], **more})

    return build


@pytest.mark.thorough
def test_shards_and_many_processes_give_the_same_bytes(many):
    manifest = prepare(many("one"))
    assert manifest["dropped"] == {"empty": 6, "duplicate": 21, "filtered": 0, "rejected": 0}
    assert len(sources.parts(many("one").data.sources)) > 10
    for i in (2, 0, 1):
        assert prepare(many("shards"), shard=(i, 3)) is None
        assert not read_manifest(Path(many("shards").data.dir))
    assert prepare(many("shards"), workers=2) == manifest  # only the merge is left
    assert prepare(many("processes"), workers=2) == manifest
    expected = contents(many("one").data.dir)
    assert contents(many("shards").data.dir) == contents(many("processes").data.dir) == expected


def test_parts_cut_nothing_and_repeat_nothing(many, tmp_path, monkeypatch):
    [source] = many("one").data.sources
    found = [document for part in sources.parts([source]) for document in sources.documents(source, part)]
    monkeypatch.setattr(sources, "PART_BYTES", 1 << 30)
    assert found == list(sources.documents(source)) and len(found) == 321
    for document in found:
        with open(document.file, "rb") as file:
            file.seek(document.row)
            assert json.loads(file.readline())["text"] == document.text


def test_a_shard_alone_needs_the_others(many):
    prepare(many("shards"), shard=(0, 2))
    with pytest.raises(UserError, match="no token files"):
        TokenFiles.open(many("shards"))


def _prepare(config, part_bytes, workers):
    sources.PART_BYTES = part_bytes
    prepare(config, workers=workers)


def killed_often(build, times, workers, seed):
    """Prepare with ``times`` kills -9 at random points; each call continues where the last was killed.

    If a call ends before its kill, its files must equal an undisturbed call's; then preparing starts from scratch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titans_pt.data_pipeline.prepare"])

    def started(name):
        process = context.Process(target=_prepare, args=(build(name), sources.PART_BYTES, workers))
        process.start()
        return process

    started("warm").join()  # starting the fork server takes seconds
    began = time.monotonic()
    started("undisturbed").join()
    duration, draw, left = time.monotonic() - began, random.Random(seed), times
    folder, expected = Path(build("killed").data.dir), contents(build("undisturbed").data.dir)
    while left or not (folder / "manifest.json").exists():
        process = started("killed")
        process.join(draw.uniform(0.1, 0.9) * duration if left else None)
        if process.is_alive():
            process.kill()
            left -= 1
        process.join()
        if process.exitcode == 0:
            assert contents(folder) == expected
            if left:
                shutil.rmtree(folder)


@pytest.mark.thorough
def test_killed_at_random_points_the_bytes_are_the_same(many):
    killed_often(many, times=4, workers=1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_ten_times(many, workers):
    killed_often(many, times=10, workers=workers, seed=workers)


def test_stopped_at_any_step_of_writing(many, monkeypatch):
    """Calls stop before a random rename until one finishes: they leave states like a kill's, independent of timing."""

    class Stop(BaseException):
        pass

    draw, replace, stops, left = random.Random(0), module.os.replace, 0, 0

    def stopping(source, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise Stop
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", stopping)
        while not (Path(many("stopped").data.dir) / "manifest.json").exists():
            left = draw.randrange(22)  # writing all files and moving them into place takes 18 renames
            try:
                prepare(many("stopped"))
            except Stop:
                stops += 1
    prepare(many("whole"))
    assert stops >= 6
    assert contents(many("stopped").data.dir) == contents(many("whole").data.dir)


def test_a_part_that_was_changed_is_found(many):
    config = many("data")
    prepare(config, shard=(0, 1))
    [build] = (Path(config.data.dir) / ".preparing").iterdir()
    for suffix in (".bin", ".parquet"):
        part = parts.part_path(build, 3, suffix)
        part.write_bytes(b"\0\0" + part.read_bytes()[2:])
        with pytest.raises(UserError, match=f"part-000003{suffix}: not the file that was written; remove"):
            prepare(config)
        parts.part_path(build, 3, ".json").unlink()
        prepare(config, shard=(0, 1))
    parts.part_path(build, 4, ".json").write_text('{"documents": 1')  # damaged: the part is written again
    prepare(config)
    prepare(many("whole"))
    assert contents(config.data.dir) == contents(many("whole").data.dir)


def test_an_error_in_a_process_is_one_line_and_finished_parts_are_kept(many, tmp_path):
    path = tmp_path / "text" / "2.jsonl"
    good = path.read_text()
    path.write_text(good + "{broken\n")
    config = many("data", tokenizer={"train_characters": 2000})
    with pytest.raises(UserError, match="2.jsonl, line at byte .*: not valid JSON .*data.bad_input=skip"):
        prepare(config, workers=2)
    [build] = (Path(config.data.dir) / ".preparing").iterdir()
    done = list(build.glob("part-*.json"))
    assert len(done) > 3
    manifest = prepare(many("data", tokenizer={"train_characters": 2000}, bad_input="skip"))
    assert manifest["dropped"]["rejected"] == 1
    [rejected] = (json.loads(line) for line in (Path(config.data.dir) / "rejected.jsonl").open())
    assert str(path) in rejected["where"] and "not valid JSON" in rejected["reason"]


def test_what_skip_left_out_is_refused_afterwards(many, tmp_path, monkeypatch):
    """Parts and token files made with data.bad_input=skip are refused by default; the error names the first gap."""
    path = tmp_path / "text" / "2.jsonl"
    path.write_text(path.read_text() + "{not json\n{nor this\n")
    message = "2.jsonl, line at byte .*: not valid JSON .*data.bad_input=skip"
    prepare(many("data", bad_input="skip"), shard=(0, 1))
    for shard in ((0, 1), None):
        with pytest.raises(UserError, match=f"data.sources: .*{message}") as error:
            prepare(many("data"), shard=shard)
        assert "\n" not in str(error.value)
    manifest = prepare(many("data", bad_input="skip"))
    assert manifest["dropped"]["rejected"] == 2 and prepare(many("data", bad_input="skip")) == manifest
    with pytest.raises(UserError, match=f"data.bad_input: given 'refuse', but .*{message}") as error:
        prepare(many("data"))
    assert "\n" not in str(error.value) and "titans prepare CONFIG --force, or" in str(error.value)
    with monkeypatch.context() as patch, pytest.raises(UserError, match=f"data.bad_input: given .*{message}"):
        patch.setattr(module, "_fingerprints", _unreachable)
        prepare(many("data"))
    list_of_them = tmp_path / "data" / "rejected.jsonl"
    list_of_them.write_text(list_of_them.read_text().replace("{", "[", 1))
    with pytest.raises(UserError, match="rejected.jsonl: its checksum is not that of the manifest"):
        prepare(many("data"))


def _unreachable(*_, **__):
    raise Unreachable("the hub is down")


def _die(*_):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_told(many, monkeypatch):
    monkeypatch.setattr(parts, "_work", _die)
    with pytest.raises(UserError, match="ended by signal 9 .*fewer --workers than 2"):
        prepare(many("data"), workers=2)


def _die_with_the_lock(job, todo, following, counters, failures):
    counters.get_lock().acquire()
    _die()


def test_a_process_that_is_killed_while_it_counts_leaves_nobody_waiting(many, monkeypatch):
    monkeypatch.setattr(parts, "_work", _die_with_the_lock)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(30)  # ends the test, which would wait for ever
    try:
        with pytest.raises(UserError, match="ended by signal 9"):
            prepare(many("data"), workers=2)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_processes_that_are_all_killed_at_once_are_told(many, monkeypatch):
    """They have ended before the first look at them."""
    kind = multiprocessing.get_context("spawn").Process
    start = kind.start
    monkeypatch.setattr(kind, "start", lambda process: (start(process), process.join()))
    monkeypatch.setattr(parts, "_work", _die)
    with pytest.raises(UserError, match="ended by signal 9"):
        prepare(many("data"), workers=2)


def test_a_process_that_ends_between_two_looks_is_told(many, monkeypatch):
    kind = multiprocessing.get_context("spawn").Process
    real, seen = kind.exitcode.fget, set()

    def exitcode(process):
        if process in seen:
            return real(process)
        seen.add(process)
        process.join()
        return None

    monkeypatch.setattr(kind, "exitcode", property(exitcode))
    monkeypatch.setattr(parts, "_work", _die)
    with pytest.raises(UserError, match="ended by signal 9"):
        prepare(many("data"), workers=2)
