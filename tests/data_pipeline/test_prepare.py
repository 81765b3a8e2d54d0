import errno
import fcntl
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pyarrow
import pytest
import sentencepiece
from pyarrow import parquet

from tests.data_pipeline.small_corpus import VOCAB, make_texts, write_jsonl
from tests.helpers.processes import ENVIRONMENT
from titans_pt.config import Config, SourceConfig
from titans_pt.config.yaml import resolved_yaml
from titans_pt.data_pipeline import IndexedDataset, IndexedWriter, TokenFiles, documents, load_tokenizer, parts
from titans_pt.data_pipeline.inspection import inspect_data
from titans_pt.data_pipeline.manifest import read_manifest
from titans_pt.data_pipeline.merge import unigram_loss
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.data_pipeline.tokenizers import train_tokenizer
from titans_pt.errors import UserError

module = importlib.import_module("titans_pt.data_pipeline.prepare")  # the package has a function of the same name
FILES = [
    "manifest.json",
    "tokenizer.model",
    "train.bin",
    "train.crc32",
    "train.documents.parquet",
    "train.idx",
    "validation.bin",
    "validation.crc32",
    "validation.documents.parquet",
    "validation.idx",
]


def names(folder):
    """Names in a folder, except the finished parts of an interrupted call."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".preparing")


def texts_of(folder, split):
    tokenizer = load_tokenizer(Path(folder) / "tokenizer.model")
    found = []
    for ids in IndexedDataset(Path(folder) / split):
        ids = ids.tolist()
        assert ids[-1] == tokenizer.eos_id and tokenizer.eos_id not in ids[:-1]
        found.append(tokenizer.decode(ids))
    return found


def test_all_text_arrives_once_in_order(config, texts):
    config = config()
    manifest = prepare(config)
    folder = config.data.dir
    assert names(Path(folder)) == FILES
    assert read_manifest(Path(folder)) == manifest
    assert sorted(manifest["files"]) == [name for name in FILES if name != "manifest.json"]
    train, validation = (texts_of(folder, split) for split in ("train", "validation"))
    assert not set(train) & set(validation) and len(validation) > 10
    assert train == [text for text in texts if text in set(train)]
    assert sorted(train + validation) == sorted(texts)
    for split, found in (("train", train), ("validation", validation)):
        assert manifest["splits"][split] == {
            "documents": len(found),
            "characters": sum(map(len, found)),
            "tokens": IndexedDataset(Path(folder) / split).tokens,
        }
    assert manifest["vocab_size"] == VOCAB and not any(manifest["dropped"].values())
    assert manifest["tokenizer_sha256"] == load_tokenizer(Path(folder) / "tokenizer.model").sha256


def test_unigram_loss_is_that_of_the_files(config):
    config = config()
    loss = prepare(config)["unigram_loss"]
    train, validation = (IndexedDataset(Path(config.data.dir) / split) for split in ("train", "validation"))
    counts = [1] * VOCAB
    for token in train.read(0, train.tokens):
        counts[token] += 1
    nats = [-math.log(counts[token] / sum(counts)) for token in validation.read(0, validation.tokens).tolist()]
    assert loss == pytest.approx(sum(nats) / len(nats)) and loss < math.log(VOCAB)
    assert unigram_loss(np.zeros(8, np.int64), np.arange(8)) == pytest.approx(math.log(8))


def test_one_text_file_is_enough(config, texts, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("\n\n".join(text.replace("\n\n", "\n") for text in texts))
    config = config(data={"sources": [{"kind": "files", "path": str(tmp_path / "book.txt")}]})
    manifest = prepare(config)
    counts = manifest["splits"]
    assert counts["train"]["documents"] + counts["validation"]["documents"] == len(texts)
    first, *lines = capsys.readouterr().err.splitlines()[-4:]
    assert first.startswith(f"{config.data.dir}: prepared in ") and first.endswith(" s")
    assert lines == [
        f"  train: {counts['train']['documents']:,} documents, {counts['train']['tokens']:,} tokens",
        f"  validation: {counts['validation']['documents']:,} documents, {counts['validation']['tokens']:,} tokens",
        "  left out: 0 empty, 0 duplicate, 0 filtered, 0 rejected",
    ]


def test_validation_from_a_source_of_its_own(config, texts, tmp_path):
    """No document of data.sources is held out, and no validation document is in the training split."""
    own = make_texts(20, seed=9)
    write_jsonl(tmp_path / "validation.jsonl", own + texts[:5] + own[:3])
    source = {"kind": "files", "path": str(tmp_path / "validation.jsonl")}
    made = config(data={"validation_sources": [source]})
    manifest = prepare(made)
    assert texts_of(made.data.dir, "validation") == own + texts[:5]
    assert texts_of(made.data.dir, "train") == texts[5:]
    assert manifest["dropped"]["duplicate"] == 8 and manifest["streams"] == ["train"]
    assert TokenFiles.open(made).validation.tokens == manifest["splits"]["validation"]["tokens"]
    with pytest.raises(UserError, match=r"data\.validation_sources: made with \[.*, config has null"):
        TokenFiles.open(config())
    weighted = {"sources": [made.data.sources[0].model_dump() | {"weight": 1.0}] * 2, "validation_sources": [source]}
    mixture = prepare(config(data=weighted | {"dir": str(tmp_path / "mixture")}))
    assert mixture["streams"] == ["train-0", "train-1"]
    assert mixture["splits"]["validation"] == manifest["splits"]["validation"]
    with pytest.raises(ValueError, match="validation_sources: given a weight"):
        config(data={"validation_sources": [source | {"weight": 1.0}]})
    write_jsonl(tmp_path / "validation.jsonl", [" "])
    with pytest.raises(UserError, match=r"data\.validation_sources: none of its documents is left for the validation"):
        prepare(config(data={"validation_sources": [source], "dir": str(tmp_path / "none")}))


def test_near_duplicates_are_left_out(config, tmp_path, monkeypatch):
    """Only the first stays of a text and its copies with exchanged words, for any number of processes."""
    monkeypatch.setattr("titans_pt.data_pipeline.sources.PART_BYTES", 9000)
    random = Random(0)
    originals = [" ".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=300)) for _ in range(40)]
    near = [text[:200] + "Z" + text[201:] for text in originals]
    far = [" ".join(word if random.random() < 0.5 else word.upper() for word in text.split()) for text in originals]
    write_jsonl(tmp_path / "texts.jsonl", [*originals, *near, *far, *originals])
    source = {"kind": "files", "path": str(tmp_path / "texts.jsonl")}
    content = set()
    for workers in (1, 3):
        made = config(data={"sources": [source], "near_duplicates": 0.8, "dir": str(tmp_path / f"data-{workers}")})
        manifest = prepare(made, workers=workers)
        assert manifest["dropped"]["near_duplicate"] == manifest["dropped"]["duplicate"] == 40
        kept = texts_of(made.data.dir, "train") + texts_of(made.data.dir, "validation")
        assert sorted(kept) == sorted(originals + far)
        content.add(manifest["content"])
    assert len(content) == 1
    all_of_them = prepare(config(data={"sources": [source]}))
    assert "near_duplicate" not in all_of_them["dropped"] and all_of_them["dropped"]["duplicate"] == 40
    with pytest.raises(UserError, match=r"data\.near_duplicates: made with null, config has 0.8"):
        TokenFiles.open(config(data={"sources": [source], "near_duplicates": 0.8}))


def test_near_duplicates_need_a_package(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError, match=r"data\.near_duplicates: needs rensa.*pip install 'titans-pt\[data\]'"):
        prepare(config(data={"near_duplicates": 0.8}))


def test_a_second_time_does_nothing(config, capfd):
    config = config()
    first = prepare(config)
    times = {name: os.stat(Path(config.data.dir) / name).st_mtime_ns for name in FILES}
    capfd.readouterr()
    assert prepare(config) == first
    assert "up to date" in capfd.readouterr().err
    assert {name: os.stat(Path(config.data.dir) / name).st_mtime_ns for name in FILES} == times
    assert prepare(config, force=True) == first
    assert names(Path(config.data.dir)) == FILES


def test_progress_is_shown_with_tokens(config, capfd):
    prepare(config())
    captured = capfd.readouterr()
    assert "tokens/s" in captured.err and captured.out == ""


def test_other_settings_are_refused_unless_forced(config, corpus, tmp_path):
    prepare(config())
    smaller = config(model={"vocab_size": 300})
    with pytest.raises(UserError, match="data.dir=.*model.vocab_size: made with 320, config has 300.*--force"):
        prepare(smaller)
    write_jsonl(corpus, make_texts(210))
    with pytest.raises(UserError, match="the text of data.sources has changed.*--force"):
        prepare(config())
    assert prepare(smaller, force=True)["vocab_size"] == 300
    assert names(tmp_path / "data") == FILES


def test_what_does_not_change_the_files_may_change(config):
    first = prepare(config())
    assert prepare(config(data={"seq_len": 32})) == first


def test_content_depends_on_text_and_tokenizer_alone(config, corpus, tmp_path):
    first = prepare(config())
    elsewhere = str(shutil.copy(corpus, tmp_path / "copy.jsonl"))
    moved = {"dir": str(tmp_path / "other"), "sources": [{"kind": "files", "path": elsewhere}]}
    assert prepare(config(data=moved))["content"] == first["content"]
    write_jsonl(corpus, make_texts(201))
    assert prepare(config(), force=True)["content"] != first["content"]


def test_split_is_stable_when_the_corpus_grows(config, corpus, tmp_path):
    prepare(config())
    before = {split: set(texts_of(tmp_path / "data", split)) for split in ("train", "validation")}
    write_jsonl(corpus, make_texts(100, seed=7) + make_texts(200))
    prepare(config(), force=True)
    after = {split: set(texts_of(tmp_path / "data", split)) for split in ("train", "validation")}
    assert before["train"] < after["train"] and before["validation"] < after["validation"]
    assert len(after["validation"]) / 300 == pytest.approx(0.2, abs=0.08)


def test_duplicates_and_empty_documents_are_dropped_across_sources(config, corpus, tmp_path, texts):
    more = write_jsonl(tmp_path / "more.jsonl", [texts[3], "", "a text of its own, about memory", texts[5], " "])
    both = [{"kind": "files", "path": str(path)} for path in (corpus, more)]
    manifest = prepare(config(data={"sources": both}))
    assert manifest["dropped"] == {"empty": 2, "duplicate": 2, "filtered": 0, "rejected": 0}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 201


def test_a_limited_tokenizer_sample_has_text_of_each_source(config, corpus, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [f"quokka zebra {i}" for i in range(200)])
    both = [{"kind": "files", "path": str(path)} for path in (corpus, other)]
    prepare(config(data={"sources": both, "tokenizer": {"train_characters": 6000}}, model={"vocab_size": 380}))
    assert len(load_tokenizer(tmp_path / "data" / "tokenizer.model").encode(" quokka zebra")) < 6


def test_given_tokenizer_is_copied(config, tokenizer, tmp_path):
    manifest = prepare(config(data={"tokenizer": {"path": str(tokenizer.path)}}))
    assert manifest["tokenizer_sha256"] == tokenizer.sha256
    assert (tmp_path / "data" / "tokenizer.model").read_bytes() == tokenizer.path.read_bytes()


def fails(config, folder, *parts):
    """Assert that prepare(config) is refused in one line with these parts, and leaves ``folder`` unchanged."""
    before = names(folder) if folder.exists() else None
    with pytest.raises(UserError) as error:
        prepare(config)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    assert (names(folder) if folder.exists() else None) in (before, before or [])


def test_a_model_may_have_room_for_more_than_the_tokenizers_entries(config, tokenizer, tmp_path, capsys):
    data = {"tokenizer": {"path": str(tokenizer.path)}}
    exact, more, less = (config(data=data, model={"vocab_size": size}) for size in (320, 50_304, 319))
    manifest = prepare(exact)
    assert manifest["settings"]["model.vocab_size"] == 320
    assert prepare(more) == manifest and "nothing to do" in capsys.readouterr().err
    for settings in (exact, more):
        assert TokenFiles.open(settings).tokenizer.vocab_size == 320
    with pytest.raises(UserError, match="model.vocab_size: given 319, but .* 320 entries: set .*=320 or more"):
        prepare(less)
    with pytest.raises(UserError, match="model.vocab_size: made with 320, config has 319.*set it back"):
        TokenFiles.open(less)
    assert prepare(more, force=True) == manifest


def test_tokenizer_of_another_size(config, tokenizer, tmp_path):
    given = config(data={"tokenizer": {"path": str(tokenizer.path)}}, model={"vocab_size": 319})
    fails(given, tmp_path / "data", "model.vocab_size", "319", "set model.vocab_size=320 or more")


def test_symbols_that_a_given_tokenizer_splits(config, tokenizer, texts, tmp_path):
    """A tokenizer is given with them, as by a run's config, or is refused; before, they were ignored."""
    given = {"path": str(tokenizer.path), "user_defined_symbols": [" kitchen"]}
    fails(config(data={"tokenizer": given}), tmp_path / "data", "user_defined_symbols: given ' kitchen'", "splits it")
    trained = train_tokenizer(texts, tmp_path / "own.model", VOCAB, 10**6, [" kitchen"])
    given["path"] = str(trained.path)
    assert prepare(config(data={"tokenizer": given}))["tokenizer_sha256"] == trained.sha256


def test_user_errors_leave_nothing(config, corpus, tmp_path):
    folder = tmp_path / "data"
    fails(config(model={"vocab_size": 30000}), folder, "model.vocab_size", "at most")
    fails(config(data={"tokenizer": {"path": "nowhere.model"}}), folder, "nowhere.model")
    fails(
        config(data={"validation_fraction": 1e-9}),
        folder,
        "data.validation_fraction",
        "none fell to the validation",
        "raise the fraction",
    )
    corpus.write_text(corpus.read_text() + "{broken\n")
    fails(config(), folder, f"{corpus}:201", "not valid JSON")
    corpus.write_text('{"text": " "}\n')
    fails(config(), folder, "data.sources: no text")


def test_a_document_with_more_tokens_than_the_format_counts(config, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LONGEST", 9)
    fails(config(), tmp_path / "data", f"the document at {corpus} row 0 has ", " tokens, at most 9 fit; cut it, or ")


@pytest.mark.parametrize("suffix", ["train.bin.part", "validation.idx.part", "manifest.json"])
@pytest.mark.parametrize("existing", [False, True])
def test_full_disk_changes_nothing_and_finished_parts_are_kept(config, tmp_path, monkeypatch, suffix, existing):
    folder = tmp_path / "data"
    if existing:
        prepare(config())
    before = {name: (folder / name).read_bytes() for name in names(folder)} if existing else {}

    def full(path, mode="r", **more):
        file = open(path, mode, **more)  # noqa: SIM115
        if not str(path).endswith(suffix) or "w" not in mode:
            return file

        class Full:
            def write(self, _):
                raise OSError(errno.ENOSPC, "No space left on device")

            def seek(self, _):
                pass

            flush = close = __enter__ = lambda self: file.close() or self

            def __exit__(self, *_):
                file.close()

        return Full()

    with monkeypatch.context() as patch:
        for name in ("parts", "indexed"):
            patch.setattr(importlib.import_module(f"titans_pt.data_pipeline.{name}"), "open", full, raising=False)
        with pytest.raises(UserError, match="data.dir=.*disk full; free space"):
            prepare(config(), force=existing)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == before
    # No part is written a second time:
    monkeypatch.setattr(importlib.import_module("titans_pt.data_pipeline.parts"), "write_part", None)
    assert prepare(config(), force=existing)["splits"]["train"]["documents"] > 100


def test_a_disk_that_fails_is_no_setting_of_the_users(config, tmp_path, monkeypatch):
    """No other folder is asked for: the same command continues, as the program says of such an error."""

    def fails_now(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(IndexedWriter, "extend", fails_now)
    with pytest.raises(OSError, match=f"Stale file handle: '{tmp_path / 'data'}'"):
        prepare(config())


def test_a_file_where_the_folder_should_be(config, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(UserError, match="data.dir=.*cannot write token files"):
        prepare(config())
    assert (tmp_path / "data").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(config, tmp_path):
    (tmp_path / "data").mkdir(mode=0o500)
    fails(config(), tmp_path / "data", "data.dir=", "Permission denied", "make the folder writable")


def test_a_source_in_a_folder_that_may_not_be_entered(config, tmp_path, monkeypatch):
    """Its own setting is named, not data.dir, which any OSError of titans prepare seems to concern."""
    real = os.stat

    def closed(path, *args, **how):
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **how)

    monkeypatch.setattr(os, "stat", closed)
    source = {"kind": "files", "path": str(tmp_path / "closed" / "text.txt")}
    fails(config(data={"sources": [source]}), tmp_path / "data", "data.sources: path=", "Permission denied; set it to")


def test_permission_refused_by_the_system(config, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.os, "replace", refuse)
    fails(config(data={"tokenizer": {"path": None}}), tmp_path / "data", "Permission denied")


def test_a_folder_left_half_moved_counts_as_empty(config, tmp_path, monkeypatch):
    prepare(config())
    replace = os.replace

    def stop(source, target):
        if Path(target) == tmp_path / "data" / "validation.bin":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(module.os, "replace", stop)
        prepare(config(model={"vocab_size": 300}), force=True)
    with pytest.raises(UserError, match="no token files"):
        TokenFiles.open(config())
    manifest = prepare(config())
    assert names(tmp_path / "data") == FILES and TokenFiles.open(config()).manifest == manifest


def test_one_process_at_a_time(config, tmp_path):
    (tmp_path / "data").mkdir()
    handle = os.open(tmp_path / "data", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        fails(config(), tmp_path / "data", "another titans prepare")
    finally:
        os.close(handle)
    prepare(config())


def test_a_file_system_without_locks_is_a_warning(config, monkeypatch, caplog):
    def none(*_):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("titans_pt.tools.locks.fcntl.flock", none)
    prepare(config())
    assert "a second titans prepare there would not be noticed" in caplog.text


def test_what_a_killed_process_left_is_cleared(config, tmp_path):
    (tmp_path / "data" / ".preparing").mkdir(parents=True)
    (tmp_path / "data" / ".preparing" / "train.bin.part").write_bytes(b"half")
    prepare(config())
    assert names(tmp_path / "data") == FILES


@pytest.mark.thorough
def test_standard_library_end_to_end(tmp_path, monkeypatch):
    """Every 15th document of the real source, with the default config except for its size."""
    some = list(documents(SourceConfig()))[::15]
    monkeypatch.setattr(module.sources, "documents", lambda *_, **__: iter(some))
    config = Config.model_validate(
        {"data": {"dir": str(tmp_path / "data"), "validation_fraction": 0.2}, "model": {"vocab_size": 1024}}
    )
    manifest = prepare(config)
    assert sum(split["characters"] for split in manifest["splits"].values()) == sum(
        map(len, {document.text for document in some})
    )
    assert 3.0 < manifest["unigram_loss"] < math.log(1024)


def test_token_files_of_others_are_a_source(config, tokenizer, texts, tmp_path):
    """Some tools write token files without eos; the result has the same texts as preparing from text."""
    with IndexedWriter(tmp_path / "theirs", VOCAB) as writer:
        for text in [*texts, texts[4]]:
            writer.add(tokenizer.encode(text))
    source = {"kind": "indexed", "path": str(tmp_path / "theirs")}
    given = {"path": str(tokenizer.path)}
    manifest = prepare(config(data={"sources": [source], "tokenizer": given, "dir": str(tmp_path / "copied")}))
    assert manifest["dropped"]["duplicate"] == 1
    found = texts_of(tmp_path / "copied", "train") + texts_of(tmp_path / "copied", "validation")
    assert sorted(found) == sorted(texts)
    fails(config(data={"sources": [source]}), tmp_path / "data", "kind=indexed holds ids", "data.tokenizer.path")
    with IndexedWriter(tmp_path / "theirs", VOCAB + 1) as writer:
        writer.add([5, VOCAB])
    fails(
        config(data={"sources": [source], "tokenizer": given}),
        tmp_path / "data",
        "document 0 has ids from 5 to 320",
        "has 320",
        "data.tokenizer.path",
    )


def test_ids_are_compared_without_bos_and_eos(config, tokenizer, texts, tmp_path):
    """The same text with eos, bos, both or neither is one document, in training or in validation."""
    bos, eos = [tokenizer.bos_id], [tokenizer.eos_id]
    forms = [([], []), ([], eos), (bos, []), (bos, eos), (bos, eos + eos), (eos, eos)]
    with IndexedWriter(tmp_path / "theirs", VOCAB) as writer:
        for i in range(len(forms)):
            for j, text in enumerate(texts):
                before, after = forms[(i + j) % 5]
                writer.add(before + tokenizer.encode(text) + after)
    source, given = {"kind": "indexed", "path": str(tmp_path / "theirs")}, {"path": str(tokenizer.path)}
    manifest = prepare(config(data={"sources": [source], "tokenizer": given}))
    assert manifest["dropped"] == {"empty": 0, "duplicate": 5 * len(texts), "filtered": 0, "rejected": 0}
    found = texts_of(tmp_path / "data", "train") + texts_of(tmp_path / "data", "validation")
    assert sorted(found) == sorted(texts)
    given["add_bos"] = True
    prepare(config(data={"sources": [source], "tokenizer": given, "dir": str(tmp_path / "bos")}))
    for ids in IndexedDataset(tmp_path / "bos" / "train"):
        assert ids[0] == tokenizer.bos_id and ids[1] != tokenizer.bos_id and list(ids).count(tokenizer.eos_id) == 1


@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_and_text_of_one_document_meet(config, corpus, tokenizer, texts, tmp_path, add_bos):
    """A document given both as ids and as text, in either split's sources, is one document in one split."""
    with IndexedWriter(tmp_path / "theirs", VOCAB) as writer:
        for text in texts[50:]:
            writer.add([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id])
    ids, text = {"kind": "indexed", "path": str(tmp_path / "theirs")}, {"kind": "files", "path": str(corpus)}

    def found(name, sources, validation=()):
        given = {"path": str(tokenizer.path), "add_bos": add_bos}
        folder = tmp_path / name
        manifest = prepare(config(data={"sources": sources, "validation_sources": list(validation),
                                        "tokenizer": given, "dir": str(folder)}))  # fmt: skip
        assert manifest["dropped"]["duplicate"] == 150
        train, held_out = ([tokenizer.decode(ids.tolist()) for ids in IndexedDataset(folder / split)]
                           for split in ("train", "validation"))  # fmt: skip
        assert sorted(train + held_out) == sorted(texts)
        return sorted(held_out)

    assert found("ids held out", [text], [ids]) == sorted(texts[50:])
    with pytest.raises(UserError, match="data.sources: none of its documents is left for the train split"):
        found("text held out", [ids], [text])
    assert found("mixed", [text, ids]) == found("turned", [ids, text])


def test_ids_without_visible_text_are_dropped_and_counted(config, tokenizer, texts, tmp_path):
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    unseen = [[], [eos], [bos, eos], [eos, eos, eos], *map(tokenizer.encode, (" ", "\n\n", "\u200b", "\0"))]
    with IndexedWriter(tmp_path / "theirs", VOCAB) as writer:
        for ids in [*unseen, *map(tokenizer.encode, texts), tokenizer.encode("日"), *unseen]:
            writer.add(ids)
    source, given = {"kind": "indexed", "path": str(tmp_path / "theirs")}, {"path": str(tokenizer.path)}
    manifest = prepare(config(data={"sources": [source], "tokenizer": given}))
    assert manifest["dropped"] == {"empty": 2 * len(unseen), "duplicate": 0, "filtered": 0, "rejected": 0}
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(texts) + 1


@pytest.mark.parametrize("kind", ["files", "indexed"])
def test_new_times_of_files_are_no_new_text(config, corpus, tokenizer, texts, tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr("titans_pt.data_pipeline.sources.PART_BYTES", 9000)
    paths, source = [corpus], {"kind": "files", "path": str(corpus)}
    if kind == "indexed":
        source = {"kind": "indexed", "path": str(tmp_path / "theirs")}
        paths = [tmp_path / "theirs.bin", tmp_path / "theirs.idx"]
        with IndexedWriter(tmp_path / "theirs", VOCAB) as writer:
            for text in texts:
                writer.add(tokenizer.encode(text))
    made = config(data={"sources": [source], "tokenizer": {"path": str(tokenizer.path)}})
    first = prepare(made)
    for path in paths:
        os.utime(path, ns=(1, 1))
    capsys.readouterr()
    second = prepare(made)
    assert second | {"fingerprint": first["fingerprint"]} == first
    assert "other modification times than before; comparing their content" in capsys.readouterr().err
    assert prepare(made) == second and "comparing" not in capsys.readouterr().err  # the new times are stored
    content = bytearray(paths[0].read_bytes())
    content[-20] ^= 1
    paths[0].write_bytes(content)  # the size is unchanged
    with pytest.raises(UserError, match="the text of data.sources has changed"):
        prepare(made)
    paths[0].write_bytes(content + content[-10:])
    with pytest.raises(UserError, match="has changed|truncated, or of another run"):
        prepare(made)
    assert "comparing" in capsys.readouterr().err


def test_a_changed_tokenizer_file_is_not_called_changed_text(config, texts, tmp_path):
    path = tmp_path / "own.model"
    train_tokenizer(texts, path, VOCAB, 10**6)
    made = config(data={"tokenizer": {"path": str(path)}})
    prepare(made)
    path.unlink()
    train_tokenizer(texts[:90], path, VOCAB, 10**6)
    with pytest.raises(UserError, match="the tokenizer in data.tokenizer.path has changed"):
        prepare(made)


def test_a_validation_shorter_than_a_sample_is_told_at_once_with_a_remedy_that_works(config, tmp_path, capsys):
    short = config(data={"validation_fraction": 0.01, "seq_len": 512})
    manifest = prepare(short)
    tokens = manifest["splits"]["validation"]["tokens"]
    assert 0 < tokens <= 512
    remedy = capsys.readouterr().err.splitlines()[-1]
    assert remedy.startswith(
        f"titans prepare: warning: data.seq_len: given 512; {tmp_path}/data/validation has {tokens} tokens, and one "
        "sample needs 513: raise data.validation_fraction from 0.01 to 0."
    )
    assert remedy.endswith("lower data.seq_len, or add text in data.sources; titans train will refuse it")
    prepare(short)
    assert remedy in capsys.readouterr().err
    with pytest.raises(UserError, match="raise data.validation_fraction from 0.01 to .* --force; or lower data.seq"):
        TokenFiles.open(short).validation_samples(short)
    TokenFiles.open(short).samples(short)
    fraction = float(remedy.split(" from 0.01 to ")[1].split()[0])
    longer = config(data={"validation_fraction": fraction, "seq_len": 512})
    prepare(longer, force=True)
    assert "warning" not in capsys.readouterr().err
    assert len(TokenFiles.open(longer).validation_samples(longer)) >= 1


def test_a_source_shorter_than_a_sample(config, corpus, tmp_path, capsys):
    small = write_jsonl(tmp_path / "small.jsonl", make_texts(2, seed=9))
    sources = [{"kind": "files", "path": str(path), "weight": 1.0} for path in (corpus, small)]
    own = {"kind": "files", "path": str(write_jsonl(tmp_path / "own.jsonl", ["a b c"]))}
    made = config(data={"sources": sources, "seq_len": 512, "validation_sources": [own]})
    prepare(made)
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert "/train-1 has " in first and "needs 513: lower data.seq_len, or add text in data.sources;" in first
    assert "/validation has " in second and "or add text in data.validation_sources;" in second
    with pytest.raises(UserError, match="/train-1 has "):
        TokenFiles.open(made).samples(made)


def test_what_is_not_read_is_in_the_summary(config, tmp_path, texts, capsys):
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text" / "a.jsonl", texts)
    source = {"kind": "files", "path": str(tmp_path / "text")}
    assert prepare(config(data={"sources": [source]}))["ignored"] == {"count": 0, "files": []}
    assert "not read" not in capsys.readouterr().err
    for i in range(120):
        (tmp_path / "text" / f"{i:03}.csv").touch()
    (tmp_path / "text" / os.fsdecode(b"caf\xe9\n.md")).touch()
    ignored = prepare(config(data={"sources": [source], "dir": str(tmp_path / "again")}))["ignored"]
    assert ignored["count"] == 121 and len(ignored["files"]) == 100
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("  not read, being hidden or of another suffix: 121 (") and line.endswith(" and 113 more)")


@pytest.mark.parametrize("workers", [1, 2])
def test_names_and_ids_that_are_not_utf8_reach_every_file(config, tmp_path, texts, workers, monkeypatch, capsys):
    """Input and output folders have Latin-1 names; rejected input is reported with its place."""
    monkeypatch.setattr("titans_pt.data_pipeline.sources.PART_BYTES", 3000)
    root, out = tmp_path / os.fsdecode(b"t\xe9xt"), tmp_path / os.fsdecode(b"d\xe9ta")
    root.mkdir()
    lines = [json.dumps({"text": text, "id": f"\ud800{i}"}) + "\n" for i, text in enumerate(texts)]
    (root / os.fsdecode(b"caf\xe9.jsonl")).write_text("".join(lines) + '{"text": "a\\udcffb"}\n{broken\n')
    (root / os.fsdecode(b"\xe9.md")).touch()
    (root / "link.jsonl").symlink_to(os.fsdecode(b"g\xf6ne"))
    made = config(data={"sources": [{"kind": "files", "path": str(root)}], "dir": str(out), "bad_input": "skip"})
    manifest = prepare(made, workers=workers)
    assert manifest["dropped"]["rejected"] == 2
    for path in out.iterdir():
        if path.suffix in (".json", ".jsonl"):
            for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                json.dumps(json.loads(text), ensure_ascii=False).encode()  # no surrogate in any string
    assert TokenFiles.open(made).manifest == manifest and prepare(made) == manifest
    rows = parquet.read_table(pyarrow.BufferReader((out / "train.documents.parquet").read_bytes())).to_pylist()
    assert {row["file"] for row in rows} == {f"{tmp_path}/t\\xe9xt/caf\\xe9.jsonl"}
    assert {row["id"][0] for row in rows if row["id"]} == {"\ufffd"}
    inspect_data(made)
    assert "t\\xe9xt/caf\\xe9.jsonl byte 0 id \ufffd0" in capsys.readouterr().out
    with pytest.raises(UserError, match="link.jsonl: a link to g.xf6ne, which cannot be followed"):
        prepare(made.model_copy(update={"data": made.data.model_copy(update={"bad_input": "refuse"})}), force=True)
    assert TokenFiles.open(made).manifest == manifest


def test_bos_if_asked_for(config, tokenizer):
    config = config(data={"tokenizer": {"path": str(tokenizer.path), "add_bos": True}})
    prepare(config)
    files = TokenFiles.open(config)
    for ids in files.train[0]:
        assert ids[0] == tokenizer.bos_id == 1 and ids[-1] == tokenizer.eos_id and 1 not in ids[1:]
        # Evaluation relies on it: files.tokenizer knows the format.
        assert [*files.tokenizer.document(files.tokenizer.decode(ids)), tokenizer.eos_id] == list(ids)


def test_bos_that_the_tokenizer_does_not_have(config, tmp_path):
    text = tmp_path / "some.txt"
    text.write_text("some text\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "a"), vocab_size=270, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    given = {"path": str(tmp_path / "a.model"), "add_bos": True}
    fails(
        config(data={"tokenizer": given}),
        tmp_path / "data",
        "data.tokenizer.add_bos: given true, but",
        "a.model has no begin-of-text piece",
        "set it to false",
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "files"},
        {"kind": "stdlib", "path": "x"},
        {"kind": "files", "path": "x", "name": "sample-10BT"},
        {"kind": "indexed", "path": "x", "minimum": {"a": 1}},
        {"kind": "hub", "path": "x", "streaming": False, "max_files": 2},
    ],
)
def test_settings_that_a_source_does_not_use_are_refused(wrong):
    with pytest.raises(ValueError, match="kind=|max_files"):
        SourceConfig(**wrong)


def test_weights_for_all_sources_or_none():
    with pytest.raises(ValueError, match="sources.1.weight: given none"):
        Config.model_validate({"data": {"sources": [{"weight": 1.0}, {}]}})


def test_what_a_user_keeps_in_the_folder_stays(config, tmp_path):
    """A file with one of our names is kept if no manifest lists it."""
    made = config()
    folder = Path(made.data.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "validation.bin").write_bytes(b"mine")
    with pytest.raises(UserError, match="data.dir=.*: holds validation.bin, which would be replaced, but no manifest"):
        prepare(made)
    assert (folder / "validation.bin").read_bytes() == b"mine"
    prepare(made, force=True)
    assert read_manifest(folder)


@pytest.mark.parametrize("kind", ["files", "hub", "indexed"])
def test_sources_are_not_read_where_token_files_are_written(config, kind):
    made = config()
    folder = Path(made.data.dir)
    prepare(made)
    source = SourceConfig(kind=kind, path=str(folder / "train" if kind == "indexed" else folder.parent))
    other = made.model_copy(update={"data": made.data.model_copy(update={"sources": [source]})})
    with pytest.raises(UserError, match="which is in data.sources.0.path=.*; choose another data.dir"):
        prepare(other, force=True)
    assert names(folder) == FILES


def test_preparing_text_imports_no_torch(config, tmp_path):
    """It takes seconds, which a call that finds nothing to do should not cost."""
    (tmp_path / "config.yaml").write_text(resolved_yaml(config()))
    program = "import sys; from titans_pt import cli; sys.exit(cli.run(sys.argv[1:]) or 'torch' in sys.modules)"
    words = ["prepare", str(tmp_path / "config.yaml"), "--workers", "1"]
    assert subprocess.run([sys.executable, "-c", program, *words], env=ENVIRONMENT, timeout=60).returncode == 0
