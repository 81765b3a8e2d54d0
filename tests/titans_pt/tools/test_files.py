"""Files that are complete or do not exist."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from titans_pt.errors import UserError
from titans_pt.tools.files import check_room, write_atomically, write_text


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    write_text(path, "old")

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_folders_are_made_and_text_is_utf8(tmp_path):
    write_text(tmp_path / "a" / "b" / "f", "\u00e9\n")
    assert (tmp_path / "a" / "b" / "f").read_bytes() == b"\xc3\xa9\n"


def test_durable_waits_for_the_disk_before_the_rename(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_text(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("titans_pt.tools.files.os.fsync", full)
    with pytest.raises(OSError, match="space"):
        write_atomically(path, lambda temporary: temporary.write_text("new"), durable=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_the_error_of_a_disk_names_the_file(tmp_path, monkeypatch, call, code):
    path = tmp_path / "f"

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    if call != "write":
        monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError) as error:
        write_atomically(path, refuse if call == "write" else Path.touch, durable=True)
    assert str(error.value) == f"[Errno {code}] {os.strerror(code)}: {str(path)!r}"
    assert not list(tmp_path.iterdir())


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(OSError) as error:
        write_atomically(tmp_path / "f", lambda temporary: shutil.copyfile(tmp_path / "missing", temporary))
    assert error.value.filename == str(tmp_path / "missing")


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path):
    old, new, other, own = (tmp_path / name for name in (".f[1].77", ".f[1].78", ".f[1].79x", ".f1.80"))
    for path in (old, new, other, own):
        path.write_text("half")
        if path != new:
            os.utime(path, (time.time() - 100_000,) * 2)
    write_text(tmp_path / "f[1]", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([new, other, own, tmp_path / "f[1]"])


@pytest.mark.parametrize(("place", "folder", "problem"), [
    ("file/x", False, "Not a directory"), ("file/a/b", True, "Not a directory"), ("file", True, "it is no folder"),
    ("sub", False, "it is a folder"), ("pipe", False, "it is no file"),
])  # fmt: skip
def test_what_cannot_be_written_is_said_before_the_work(tmp_path, place, folder, problem):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError) as error:
        check_room(tmp_path / place, "--out", folder)
    kind = "folder" if folder else "file"
    assert str(error.value) == f"--out: {tmp_path / place} cannot be written to ({problem}); name a {kind} where you " \
                               "may write"  # fmt: skip


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_it_is_really_tried_and_the_remedy_can_be_another(tmp_path, monkeypatch, code):
    def refused(dir):
        assert dir == tmp_path
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("titans_pt.tools.files.tempfile.TemporaryFile", refused)
    with pytest.raises(UserError, match=rf"^RUN: .*/new/x cannot be .* \({os.strerror(code)}\); give --out DIR$"):
        check_room(tmp_path / "new/x", "RUN; give --out DIR")


def test_a_disk_that_fails_may_be_gone_when_the_command_is_restarted(tmp_path, monkeypatch):
    """It is no UserError: a launcher starts the command again."""

    def refused(dir):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("titans_pt.tools.files.tempfile.TemporaryFile", refused)
    with pytest.raises(OSError) as error:
        check_room(tmp_path / "x", "--out")
    assert error.value.filename == str(tmp_path)


def test_where_there_is_room_nothing_is_left(tmp_path):
    write_text(tmp_path / "old", "old")
    for place, folder in (("old", False), ("new", False), ("new", True), ("a/b/c", True), (".", True)):
        check_room(tmp_path / place, "--out", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"
