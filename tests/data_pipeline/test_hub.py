"""The production call for FineWeb-Edu, on a folder with the same layout, and over HTTP from an imitation of the hub."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from huggingface_hub.utils import filter_repo_objects

from tests.data_pipeline.hub_server import Hub
from tests.data_pipeline.real_text import fineweb_row, write_layout
from tests.data_pipeline.small_corpus import VOCAB, make_texts
from titans_pt.config import SourceConfig
from titans_pt.data_pipeline import documents, hub, sources
from titans_pt.data_pipeline.inspection import document_place
from titans_pt.data_pipeline.packing import TokenFiles
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.errors import UserError


@pytest.fixture
def fineweb(tmp_path, monkeypatch):
    """The working directory holds HuggingFaceFW/fineweb-edu; returns its rows."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    rows = [fineweb_row(text, str(i), i) for i, text in enumerate(make_texts(500, seed=2))]
    write_layout(tmp_path, rows, rows_a_file=200, row_group=7)
    hub._load.cache_clear()
    hub._load_builder.cache_clear()
    return rows


def source(**more):
    return SourceConfig(kind="hub", path="HuggingFaceFW/fineweb-edu", name="sample-10BT", **more)


@pytest.mark.parametrize("streaming", [True, False])
def test_all_rows_once_in_order(fineweb, streaming, monkeypatch):
    monkeypatch.setattr(hub, "ROWS", 60)
    found = list(documents(source(streaming=streaming)))
    assert [(d.text, d.id) for d in found] == [(row["text"], row["id"]) for row in fineweb]
    parts = sources.parts([source(streaming=streaming)])
    assert len(parts) == (3 * hub.SLICES if streaming else 9)
    middle = [d.text for part in parts[4:7] for d in documents(source(streaming=streaming), part)]
    assert 0 < len(middle) < 300 and middle[0] in {row["text"] for row in fineweb}


def test_only_some_files(fineweb):
    assert [d.id for d in documents(source(max_files=2))] == [row["id"] for row in fineweb[:400]]
    assert sources.fingerprint(source(max_files=2)) != sources.fingerprint(source())


def test_rows_below_a_score_are_dropped_and_counted(fineweb, config, tmp_path):
    chosen = [row for row in fineweb if row["int_score"] >= 3 and row["language_score"] >= 0.7]
    entry = source(minimum={"int_score": 3, "language_score": 0.7}).model_dump()
    manifest = prepare(config(data={"sources": [entry]}))
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(chosen)
    assert manifest["dropped"]["filtered"] == len(fineweb) - len(chosen) > 0
    assert manifest["round_trip"]["equal"] == manifest["round_trip"]["tried"] > 0


def test_each_document_can_be_traced(fineweb, config):
    config = config(data={"sources": [source().model_dump()]})
    prepare(config)
    files = TokenFiles.open(config)
    by_id = {row["id"]: row["text"] for row in fineweb}
    for stream in (*files.train, files.validation):
        for j in range(0, len(stream), 17):
            place = document_place(stream, j)
            assert files.tokenizer.decode(stream[j].tolist()) == by_id[place["id"]]
            assert place["tokens"] == len(stream[j]) and "_00000.parquet#" in place["file"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "sample-11BT"}, ["sample-11BT", "name"]),
        ({"split": "test"}, ["no split 'test'; there are train"]),
        ({"path": "nobody/nothing"}, ["nobody/nothing"]),
        ({"text_column": "body"}, ["text_column='body'", "text, id, dump"]),
    ],
)
def test_a_wrong_name_is_one_line(fineweb, monkeypatch, change, words):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        list(documents(source().model_copy(update=change)))
    for word in ("data.sources", *words):
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_another_version_is_another_fingerprint(fineweb, tmp_path):
    before = sources.fingerprint(source())
    assert sources.fingerprint(source()) == before
    path = Path("HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet")
    path.write_bytes(path.read_bytes() + b" ")
    hub._load_builder.cache_clear()
    assert sources.fingerprint(source()) != before
    json.dumps(hub.version(source()))


DOCS = Path(__file__).parents[2] / "docs/data.md"
SAMPLE_100BT = [f"sample/100BT/{i:03d}_{j:05d}.parquet" for i in range(14) for j in range(10)]
"""The 140 files of FineWeb-Edu's sample-100BT."""


def test_the_documented_patterns_are_24_files():
    """Files that max_files=24 would stream."""
    command = re.search(r"hf download HuggingFaceFW/fineweb-edu.*?```", DOCS.read_text(), re.S)[0]
    patterns = re.findall(r"--include '(.+?)'", command)
    others = ["README.md", "data/CC-MAIN-2024-10/000_00000.parquet", "sample/10BT/000_00000.parquet"]
    assert list(filter_repo_objects([*SAMPLE_100BT, *others], allow_patterns=patterns)) == SAMPLE_100BT[:24]
    assert "max_files: 24" in DOCS.read_text()


# ---- over HTTP

CALL = """
import sys
from titans_pt import cli
from titans_pt.data_pipeline import hub

hub.SLICES = 4
statuses = [cli.run(["prepare", config, "--workers", "1"]) for config in sys.argv[1:]]
print("statuses", *statuses)
"""


@pytest.fixture
def over_http(tmp_path):
    """Write a dataset for the hub and return ``call(address, *configs, **environment)``.

    The call runs titans prepare on the configs in one new process. A config is (name of data.dir, changes of the
    source).
    """
    rows = [fineweb_row(text, str(i), i) for i, text in enumerate(make_texts(200, seed=2))]
    home = write_layout(tmp_path / "served", rows, rows_a_file=100, row_group=20)

    def start(address, *configs, **environment):
        paths = []
        for name, changes in configs:
            entry = changes if "kind" in changes else source(**changes).model_dump()
            path = tmp_path / f"{name}.yaml"
            data = {"dir": str(tmp_path / name), "sources": [entry], "validation_fraction": 0.2, "seq_len": 64}
            tree = {"data": data, "model": {"vocab_size": VOCAB}, "train": {"batch_tokens": 512}}
            path.write_text(yaml.safe_dump(tree))
            paths.append(str(path))
        ours = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "USE_TORCH": "NO"}  # else imported
        environment = os.environ | ours | environment
        return subprocess.Popen(
            [sys.executable, "-c", CALL, *paths],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def call(address, *configs, **environment):
        out, err = start(address, *configs, **environment).communicate(timeout=250)
        assert "statuses" in out, err
        return [int(status) for status in out.splitlines()[-1].split()[1:]], out, err

    call.start, call.home = start, home
    return call


def content(folder):
    return json.loads((folder / "manifest.json").read_text())["content"]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_production_call_over_http(over_http, tmp_path):
    """The call is killed while streaming, continued over a breaking connection, run as a download, and run offline."""
    streamed, downloaded = ("streamed", {}), ("downloaded", {"streaming": False})
    with Hub(tmp_path / "served") as hub_:
        killed = over_http.start(hub_.address, streamed)
        while not list(tmp_path.glob("streamed/.preparing/*/part-*.json")):
            assert killed.poll() is None, killed.communicate()
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
        finished = list(tmp_path.glob("streamed/.preparing/*/part-*.json"))
        assert 0 < len(finished) < 8 and not (tmp_path / "streamed/manifest.json").exists()
        before, hub_.breaks = [(path, path.stat().st_mtime_ns) for path in finished], 1
        resumed = over_http.start(hub_.address, streamed, downloaded)
        with contextlib.suppress(FileNotFoundError):
            while resumed.poll() is None and not (tmp_path / "streamed/manifest.json").exists():
                assert all(path.stat().st_mtime_ns == at for path, at in before)
                time.sleep(0.05)
        out, err = resumed.communicate(timeout=250)
        assert out.splitlines()[-1] == "statuses 0 0", err
        assert hub_.breaks == 0
        address = hub_.address
    local = {"kind": "files", "path": str(over_http.home / "sample/10BT")}
    statuses, out, err = over_http(
        address, ("local", local), streamed, downloaded, ("cached", {"streaming": False}), ("cached-2", {}),
        ("some", {"max_files": 1}), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert statuses == [0, 0, 0, 0, 0, 2], err
    assert len({content(tmp_path / name) for name in ("local", "streamed", "downloaded", "cached", "cached-2")}) == 1
    assert err.count("holds token files made with these settings, nothing to do; whether the text has changed") == 2
    assert "the copy in the cache of datasets has all files; leave out max_files=1" in err


@pytest.mark.slow(reason="waits half a minute for datasets to give up asking a hub that is down")
@pytest.mark.timeout(900)
def test_a_hub_that_is_down(over_http, tmp_path):
    with Hub(tmp_path / "served") as hub_:
        address = hub_.address
        assert over_http(address, ("first", {"streaming": False}))[0] == [0]
    statuses, _, err = over_http(address, ("first", {"streaming": False}), ("second", {}))
    assert statuses == [0, 0], err
    assert content(tmp_path / "first") == content(tmp_path / "second")
    shutil.rmtree(tmp_path / "home")
    statuses, _, err = over_http(address, ("first", {"streaming": False}), ("third", {}), HF_HUB_OFFLINE="1")
    assert statuses == [0, 2] and "Couldn't reach" in err, err
