"""The production call of FineWeb-Edu, on a folder laid out like it; no network."""

import json
from pathlib import Path

import pytest

from tests.data_pipeline.real_text import fineweb_row, write_layout
from tests.data_pipeline.small_corpus import make_texts
from titans_pt.config import SourceConfig
from titans_pt.data_pipeline import documents, hub, prepare, sources
from titans_pt.data_pipeline.inspection import document_place
from titans_pt.data_pipeline.packing import TokenFiles
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


@pytest.mark.parametrize(("change", "words"), [
    ({"name": "sample-11BT"}, ["sample-11BT", "name"]),
    ({"split": "test"}, ["no split 'test'; there are train"]),
    ({"path": "nobody/nothing"}, ["nobody/nothing"]),
    ({"text_column": "body"}, ["text_column='body'", "text, id, dump"]),
])
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
