import errno
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_pipeline.small_corpus import make_texts, write_jsonl
from tests.data_pipeline.streams import dataset
from titans_pt.data_pipeline import (
    IndexedDataset,
    IndexedWriter,
    Mixture,
    PackedSamples,
    TokenFiles,
    answers,
    inspection,
)
from titans_pt.data_pipeline.manifest import read_manifest
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.errors import UserError
from titans_pt.tools.sealed import seal

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 20), st.integers(0, 2**40), st.integers(0, 3), st.booleans())
def test_an_epoch_covers_every_token_once(sizes, seq_len, seed, epoch, shuffle):
    data = dataset(sizes)
    if data.tokens < seq_len + 1:
        return
    samples = PackedSamples(data, seq_len, seed, shuffle)
    n = len(samples)
    drawn = [samples.sample(epoch * n + i) for i in range(n)]
    inputs = np.sort(np.concatenate([ids[:-1] for ids, _ in drawn]))
    targets = np.sort(np.concatenate([ids[1:] for ids, _ in drawn]))
    assert np.array_equal(inputs, np.arange(n * seq_len)) and np.array_equal(targets, np.arange(1, n * seq_len + 1))
    assert data.tokens - (n * seq_len + 1) < seq_len
    starts = {start for start in data.document_starts.tolist() if start < n * seq_len}
    assert {int(token) for ids, reset in drawn for token in ids[:-1][reset]} == starts
    for ids, reset in drawn:
        assert (ids.dtype, ids.shape, reset.dtype, reset.shape) == (np.int64, (seq_len + 1,), bool, (seq_len,))


def test_order_is_a_function_of_seed_and_position():
    data = dataset([1000])
    one, two = (PackedSamples(data, 10, seed=3) for _ in range(2))
    order = [one.index(i) for i in range(3 * len(one))]
    assert [two.index(i) for i in reversed(range(3 * len(one)))] == order[::-1]  # independent of earlier calls
    epochs = [order[i : i + len(one)] for i in range(0, len(order), len(one))]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [PackedSamples(data, 10, seed=4).index(i) for i in range(len(one))] != epochs[0]
    assert [PackedSamples(data, 10, 3, shuffle=False).index(i) for i in (0, 1, 98, 99)] == [0, 1, 98, 0]


def test_seed_and_epoch_do_not_collide():
    """Seeds and epochs whose sum or joined digits are equal still give different orders."""
    data = dataset([1000])
    pairs = [(seed, epoch) for seed in (0, 1, 2, 1 << 32, (1 << 32) + 1) for epoch in range(4)]
    orders = {tuple(PackedSamples(data, 10, seed).index(epoch * 99 + i) for i in range(99)) for seed, epoch in pairs}
    assert len(orders) == len(pairs)


def test_order_never_changes():
    """The order is frozen: another one would break resuming every existing run."""
    samples = PackedSamples(dataset([101]), 10, seed=0)
    assert [samples.index(i) for i in range(20)] == [0, 8, 9, 5, 6, 2, 7, 4, 3, 1, 1, 7, 3, 6, 4, 2, 8, 0, 9, 5]


def test_describe_names_the_documents():
    samples = PackedSamples(dataset([7, 3, 11, 20]), 10, seed=0, shuffle=False)
    assert samples.describe(0) == {
        "position": 0,
        "epoch": 0,
        "sample": 0,
        "tokens": [0, 11],
        "documents": [0, 2],
        "file": "stream.bin",
    }
    assert samples.describe(5) == {
        "position": 5,
        "epoch": 1,
        "sample": 1,
        "tokens": [10, 21],
        "documents": [2, 2],
        "file": "stream.bin",
    }
    json.dumps(samples.describe(3))


def test_too_few_tokens():
    with pytest.raises(UserError, match="data.seq_len: given 10; .* has 10 tokens, .* needs 11"):
        PackedSamples(dataset([10]), 10, 0)
    assert len(PackedSamples(dataset([11]), 10, 0)) == 1


WEIGHTS = st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.7, 1, 3, 1 / 3]), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 10**10), st.integers(1, 400))
def test_weights_of_a_mixture_are_exact_over_any_window(weights, start, length):
    mixture = Mixture([PackedSamples(dataset([100 + i]), 10, 0) for i in range(len(weights))], weights)
    drawn = [mixture.locate(position)[0] for position in range(start, start + length)]
    bound = 1 if len(weights) <= 2 else 2 + math.log(len(weights))
    for stream, weight in enumerate(weights):
        assert abs(drawn.count(stream) - length * weight / sum(weights)) < bound + 1e-6


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 300))
def test_each_stream_of_a_mixture_is_read_in_its_own_order(weights, length):
    streams = [PackedSamples(dataset([100 + 30 * i]), 10, 0) for i in range(len(weights))]
    mixture, after = Mixture(streams, weights), [0] * len(weights)
    for position in range(length):
        stream, own = mixture.locate(position)
        assert own == after[stream]
        after[stream] += 1
        assert np.array_equal(mixture.sample(position)[0], streams[stream].sample(own)[0])
        assert mixture.describe(position)["position"] == position
        assert mixture.stream(position) is streams[stream].dataset


def test_order_of_a_mixture_never_changes():
    """The order is frozen like a single stream's."""
    mixture = Mixture([PackedSamples(dataset([101]), 10, 0) for _ in range(3)], [0.2, 0.5, 0.3])
    assert [mixture.locate(i)[0] for i in range(20)] == [0, 1, 2, 1, 0, 1, 2, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 2, 1]


def test_weights_may_change_without_new_token_files(config, corpus, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", make_texts(60, seed=9))

    def weighted(*weights):
        sources = [
            {"kind": "files", "path": str(path), "weight": weight}
            for path, weight in zip((corpus, other), weights, strict=True)
        ]
        return config(data={"sources": sources})

    manifest = prepare(weighted(0.7, 0.3))
    assert manifest["streams"] == ["train-0", "train-1"]
    files = TokenFiles.open(weighted(0.5, 0.5))
    samples = files.samples(weighted(0.5, 0.5))
    found = [samples.describe(i)["file"] for i in range(40)]
    assert found.count(f"{tmp_path}/data/train-0.bin") == 20
    assert prepare(weighted(0.1, 0.9)) == manifest
    assert TokenFiles.open(weighted(1, 1)).fingerprint != TokenFiles.open(weighted(0.7, 0.3)).fingerprint  # other order
    with pytest.raises(UserError, match="mixture: made with true, config has false"):
        TokenFiles.open(config(data={"sources": [{"kind": "files", "path": str(p)} for p in (corpus, other)]}))


def test_token_files_of_format_1_can_be_trained_on(config, tmp_path):
    """Version 0.1.0 wrote such files: all settings are spelt out, and there is no list of documents."""
    manifest = prepare(config())
    path = tmp_path / "data" / "manifest.json"
    source = {"kind": "files", "path": str(tmp_path / "corpus.jsonl"), "text_column": "text"}
    settings = {
        "model.vocab_size": 320,
        "data.sources": [source],
        "data.validation_fraction": 0.2,
        "data.tokenizer": {"path": None, "train_characters": 20_000_000},
    }
    kept = {key: manifest[key] for key in ("content", "tokenizer_sha256", "vocab_size", "splits", "unigram_loss")}
    path.write_text(json.dumps({"format": 1, "settings": settings, **kept}))
    assert TokenFiles.open(config()).samples(config()).sample(0)[0].shape == (65,)
    tokenizer = path.parent / "tokenizer.model"
    model = tokenizer.read_bytes()
    tokenizer.write_bytes(model[:-1])
    refused(config(), f"{tokenizer}: not the tokenizer that made the token files next to it; put it back")
    tokenizer.write_bytes(model)
    with pytest.raises(UserError, match="file format 1, this version writes 2.*--force"):
        prepare(config())
    path.write_text(json.dumps({"format": 9}))
    with pytest.raises(UserError, match="data: token files of another version .file format 9, .*--force"):
        TokenFiles.of_another_text(config(), path.parent)


def test_real_files(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        for ids in ([5, 6, 2], [7, 2], [8, 9, 10, 2]):
            writer.add(ids)
    samples = PackedSamples(IndexedDataset(tmp_path / "a"), 4, 0, shuffle=False)
    ids, reset = samples.sample(0)
    assert ids.tolist() == [5, 6, 2, 7, 2] and reset.tolist() == [True, False, False, True]
    ids, reset = samples.sample(1)
    assert ids.tolist() == [2, 8, 9, 10, 2] and reset.tolist() == [False, True, False, False]
    ids[0] = 3  # a copy: the file is unchanged
    assert samples.sample(1)[0][0] == 2


def test_token_files_open(config, texts):
    config = config()
    manifest = prepare(config)
    files = TokenFiles.open(config)
    assert files.manifest == manifest and files.fingerprint == manifest["content"]
    assert files.train[0].tokens == manifest["splits"]["train"]["tokens"]
    assert files.tokenizer.decode(files.validation[0].tolist()) in texts
    ids, _ = files.samples(config).sample(0)
    assert ids.max() < config.model.vocab_size


def refused(config, *parts):
    with pytest.raises(UserError) as error:
        TokenFiles.open(config)
    for part in ("titans prepare", *parts):
        assert part in str(error.value), str(error.value)


def test_token_files_missing_changed_or_broken(config, tmp_path):
    folder = tmp_path / "data"
    refused(config(), f"data.dir={folder}", "no token files")
    prepare(config())
    refused(config(model={"vocab_size": 500}), "model.vocab_size", "320", "500")
    refused(config(data={"validation_fraction": 0.1}), "data.validation_fraction", "0.2", "0.1")
    model = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(model + model[-20:])
    with pytest.raises(UserError, match="tokenizer.model"):
        TokenFiles.open(config())
    (folder / "tokenizer.model").write_bytes(model)
    TokenFiles.open(config())
    (folder / "validation.bin").write_bytes(b"")
    refused(config(), "validation.bin")
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(seal(manifest | {"format": 99})))
    refused(config(), "99")
    for damaged in ("{", "[]", "\0" * 99, json.dumps(seal(manifest) | {"unigram_loss": 1.0}), '{"format": 2}'):
        (folder / "manifest.json").write_text(damaged)
        refused(config(), "manifest.json: damaged", "--force")
        with pytest.raises(UserError, match="manifest.json: damaged.*--force"):
            prepare(config())
    prepare(config(), force=True)
    TokenFiles.open(config())


def flip(path, at):
    """Flip one bit of the byte at this offset."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train.idx", "validation.idx", "train.crc32", "tokenizer.model"])
@pytest.mark.parametrize("damage", ["flip", "zero", "delete", "folder"])
def test_a_damaged_index_or_tokenizer_is_refused_when_it_is_opened(config, tmp_path, name, damage):
    prepare(config())
    path = tmp_path / "data" / name
    size = path.stat().st_size
    if damage == "flip":
        flip(path, size // 2)
    elif damage == "zero":
        path.write_bytes(bytes(size))
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    refused(config(), str(path), "--force")
    prepare(config(), force=True)
    TokenFiles.open(config())


@pytest.mark.parametrize("name", ["train.idx", "train.crc32", "train.bin"])
def test_a_server_that_fails_is_no_damage(config, tmp_path, monkeypatch, name):
    """A launcher starts the training again, which it does not after a UserError."""
    prepare(config())
    lost, real = tmp_path / "data" / name, os.stat

    def failing(path, *args, **how):
        if str(path) == str(lost):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *args, **how)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match=f"Stale file handle: '{lost}'"):
        TokenFiles.open(config())


@pytest.mark.parametrize("module", [answers, inspection])
def test_a_server_that_fails_is_no_damaged_list_of_documents(prepared, monkeypatch, module):
    def failing(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(module, "arrow_file", failing)
    stream = IndexedDataset(prepared / "train")
    with pytest.raises(OSError, match=f"Stale file handle: '{stream.list_of_documents}'"):
        answers.Answers(stream) if module is answers else inspection.document_place(stream, 0)


def test_damaged_tokens_are_refused_when_they_are_read(config, tmp_path):
    """Damage is not noticed while only other pages are read."""
    prepare(config())
    files = TokenFiles.open(config())
    flip(tmp_path / "data" / "train.bin", 3 * 4096 // 2)  # in the second page: tokens 2048 to 4095
    stream = files.train[0]
    stream.read(0, 2048)
    stream.read(4096, stream.tokens)
    with pytest.raises(UserError, match=r"train.bin: damaged: tokens 2048 to 4095 .*titans prepare CONFIG --force"):
        stream.read(4000, 4100)
    with pytest.raises(UserError, match="train.bin: damaged"):
        for position in range(len(files.samples(config()))):
            files.samples(config()).sample(position)


def test_ids_that_the_vocabulary_does_not_have_are_damage_even_without_checksums(config, tmp_path):
    """Token files of earlier versions have no checksums of pages."""
    manifest = prepare(config())
    folder = tmp_path / "data"
    old = {name: manifest["files"][name] for name in ("train.bin", "validation.bin")}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": old}))
    for name in ("train.crc32", "validation.crc32"):
        (folder / name).unlink()
    files = TokenFiles.open(config())
    with (folder / "train.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(UserError, match="train.bin: damaged: tokens 0 to 9 have ids from .* to 65535"):
        files.train[0].read(0, 10)


@pytest.mark.parametrize("spelling", ["corpus.jsonl", "./corpus.jsonl", "../{}/corpus.jsonl", "{}"])
def test_one_file_in_several_spellings_is_no_other_setting(config, corpus, tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)

    def given(path):
        return config(data={"sources": [{"kind": "files", "path": str(path)}]})

    manifest = prepare(given("./corpus.jsonl"))
    again = given(spelling.format(corpus if spelling == "{}" else tmp_path.name))
    TokenFiles.open(again)
    assert prepare(again) == manifest, "nothing to do"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    TokenFiles.open(given(corpus))
    assert prepare(given(corpus)) == manifest
    for other in ("../corpus.jsonl", tmp_path / "other.jsonl", "other/corpus.jsonl"):
        refused(given(other), "data.sources: made with", str(other))
