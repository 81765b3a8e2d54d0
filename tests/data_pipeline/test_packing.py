import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import IndexedDataset, IndexedWriter, Loader, PackedSamples, TokenFiles, prepare
from titans_pt.errors import UserError


def dataset(sizes):
    """A stream 0, 1, 2, ... cut into documents of these sizes: each token is its own place in the stream."""
    starts = np.cumsum([0, *sizes])
    return SimpleNamespace(prefix="stream", tokens=int(starts[-1]), document_starts=starts[:-1],
                           read=lambda start, stop: np.arange(start, stop, dtype=np.uint16))


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
    assert [two.index(i) for i in reversed(range(3 * len(one)))] == order[::-1]  # whatever was asked before
    epochs = [order[i:i + len(one)] for i in range(0, len(order), len(one))]
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
    """Frozen: another order would break the resuming of every run that was started before."""
    samples = PackedSamples(dataset([101]), 10, seed=0)
    assert [samples.index(i) for i in range(20)] == [0, 8, 9, 5, 6, 2, 7, 4, 3, 1, 1, 7, 3, 6, 4, 2, 8, 0, 9, 5]


def test_describe_names_the_documents():
    samples = PackedSamples(dataset([7, 3, 11, 20]), 10, seed=0, shuffle=False)
    assert samples.describe(0) == {
        "position": 0, "epoch": 0, "sample": 0, "tokens": [0, 11], "documents": [0, 2], "file": "stream.bin"}
    assert samples.describe(5) == {
        "position": 5, "epoch": 1, "sample": 1, "tokens": [10, 21], "documents": [2, 2], "file": "stream.bin"}
    json.dumps(samples.describe(3))


def test_too_few_tokens():
    with pytest.raises(UserError, match="data.seq_len: given 10; .* has 10 tokens, .* needs 11"):
        PackedSamples(dataset([10]), 10, 0)
    assert len(PackedSamples(dataset([11]), 10, 0)) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 500), st.integers(1, 12))
def test_batch_is_the_same_for_any_ranks_micro_batch_and_resume_point(micro_batch, world, steps, consumed, seq_len):
    samples = PackedSamples(dataset([90, 5, 45]), seq_len, seed=1)
    batch = micro_batch * world * steps
    whole, reset = next(Loader(samples, batch, 0, 1, batch).batches(consumed))
    assert whole.tolist() == [samples.sample(consumed + i)[0].tolist() for i in range(batch)]
    rows = {}
    for rank in range(world):
        loader = Loader(samples, micro_batch, rank, world, batch)
        list(loader.batches(consumed - batch) if consumed >= batch else ())  # so that it has read ahead
        parts = list(loader.batches(consumed))
        assert len(parts) == loader.micro_steps == steps
        for step, (ids, resets) in enumerate(parts):
            assert ids.shape == (micro_batch, seq_len + 1) and ids.dtype == torch.int64
            assert resets.shape == (micro_batch, seq_len) and resets.dtype == torch.bool
            for position, row, marks in zip(loader.positions(consumed, step), ids, resets, strict=True):
                assert position not in rows
                rows[position] = row.tolist(), marks.tolist()
    assert [rows[consumed + i][0] for i in range(batch)] == whole.tolist()
    assert [rows[consumed + i][1] for i in range(batch)] == reset.tolist()


def test_jumping_back_and_leaving_a_batch_early():
    loader = Loader(PackedSamples(dataset([200]), 10, seed=0), 2, 0, 1, 4)
    first = [ids.tolist() for ids, _ in loader.batches(8)]
    next(loader.batches(12))
    assert [ids.tolist() for ids, _ in loader.batches(8)] == first


@pytest.mark.parametrize(("batch", "micro", "world", "parts"), [
    (12, 8, 1, ["train.batch_tokens=120", "train.micro_batch=8", "1 ranks", "set train.micro_batch=6", "=160"]),
    (12, 4, 2, ["train.micro_batch=3", "train.batch_tokens=160"]),
    (10, 2, 4, ["4 ranks", "set train.batch_tokens=160"]),
    (2, 4, 4, ["set train.batch_tokens=160"]),
])
def test_indivisible_batch(batch, micro, world, parts):
    samples = PackedSamples(dataset([200]), 10, seed=0)
    with pytest.raises(UserError) as error:
        Loader(samples, micro, 0, world, batch)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_real_files(tmp_path):
    with IndexedWriter(tmp_path / "a", 100) as writer:
        for ids in ([5, 6, 2], [7, 2], [8, 9, 10, 2]):
            writer.add(ids)
    samples = PackedSamples(IndexedDataset(tmp_path / "a"), 4, 0, shuffle=False)
    ids, reset = samples.sample(0)
    assert ids.tolist() == [5, 6, 2, 7, 2] and reset.tolist() == [True, False, False, True]
    ids, reset = samples.sample(1)
    assert ids.tolist() == [2, 8, 9, 10, 2] and reset.tolist() == [False, True, False, False]
    ids[0] = 3  # a copy: the file stays
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
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    refused(config(), "99")
    (folder / "manifest.json").write_text("{")
    refused(config(), "no token files")
