"""Files that are whole or not there."""

import errno
import os

import pytest

from titans_pt.tools.files import write_atomically, write_text


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
