import errno
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets import indexed_dataset as megatron

from titans_pt.data_pipeline import indexed
from titans_pt.data_pipeline.indexed import IndexedDataset, IndexedWriter
from titans_pt.errors import UserError


def write(prefix, documents, vocab_size=1000):
    with IndexedWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add(ids)
    return prefix


def read_by_the_format(prefix):
    """Read Megatron's format by its description: (dtype code, list of documents, document indices)."""
    idx, tokens = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    version, code, count, document_count = struct.unpack("<QBQQ", idx[9:34])
    assert version == 1
    sizes = struct.unpack(f"<{count}i", idx[34 : 34 + 4 * count])
    pointers = struct.unpack(f"<{count}q", idx[34 + 4 * count : 34 + 12 * count])
    documents = struct.unpack(f"<{document_count}q", idx[34 + 12 * count :])
    dtype = {8: np.uint16, 4: np.int32}[code]
    found = [np.frombuffer(tokens, dtype, n, at).tolist() for n, at in zip(sizes, pointers, strict=True)]
    return code, found, documents


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), max_size=20), st.sampled_from([1000, 100_000]))
def test_megatron_format_and_back(tmp_path_factory, documents, vocab_size):
    prefix = write(tmp_path_factory.mktemp("indexed") / "train", documents, vocab_size)
    code, found, indices = read_by_the_format(prefix)
    assert code == (8 if vocab_size == 1000 else 4)
    assert found == documents and indices == tuple(range(len(documents) + 1))
    dataset = IndexedDataset(prefix)
    stream = [token for ids in documents for token in ids]
    assert len(dataset) == len(documents) and [ids.tolist() for ids in dataset] == documents
    assert dataset.tokens == len(stream) and dataset.read(0, len(stream)).tolist() == stream
    assert list(dataset.document_starts) == np.cumsum([0, *map(len, documents)])[:-1].tolist()


def test_reading_is_random_access_without_a_copy(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[1, 2, 3], [4], [5, 6]]))
    view = dataset.read(2, 5)
    assert view.tolist() == [3, 4, 5] and view.base is not None and not view.flags.writeable
    assert dataset[-1].tolist() == [5, 6]
    for start, stop in ((-1, 2), (0, 7), (3, 2)):
        with pytest.raises(IndexError):
            dataset.read(start, stop)
    for i in (3, -4):
        with pytest.raises(IndexError):
            dataset[i]


def test_uint16_holds_all_ids_of_65536(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[0, 65535]], 65536))
    assert dataset.dtype == np.uint16 and dataset[0].tolist() == [0, 65535]


def test_documents_of_several_sequences(tmp_path):
    """Other Megatron tools write such files: int32, two sequences in the first document."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 3)
    (tmp_path / "a.idx").write_bytes(header + struct.pack("<3i3q3q", 2, 1, 2, 0, 8, 12, 0, 2, 3))
    (tmp_path / "a.bin").write_bytes(np.arange(5, dtype="<i4").tobytes())
    dataset = IndexedDataset(tmp_path / "a")
    assert len(dataset) == 3 and list(dataset.document_starts) == [0, 3]
    assert dataset.read(0, 5).tolist() == list(range(5))
    assert [dataset.document(j).tolist() for j in range(2)] == [[0, 1, 2], [3, 4]]


def test_missing_or_truncated_files(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]])
    bin_, idx, crc = (prefix.with_suffix(suffix) for suffix in indexed.SUFFIXES)
    good = {path: path.read_bytes() for path in (idx, bin_, crc)}
    flipped = bytearray(good[idx])
    flipped[34] = 4  # the first size
    pointer = bytearray(good[idx])
    pointer[34 + 8] = 2  # the first pointer
    cases = [
        (idx, None, "No such file"),
        (bin_, None, "No such file"),
        (idx, b"", "truncated"),
        (idx, good[idx][:-1], "truncated"),
        (idx, b"X" + good[idx][1:], "not an indexed dataset"),
        (bin_, good[bin_][:-1], "truncated"),
        (bin_, good[bin_] * 2, "truncated, or of another run"),
        (idx, bytes(flipped), "contradict"),
        (idx, bytes(pointer), "contradict"),
        (crc, None, "No such file"),
        (crc, good[crc] * 2, "2 checksums for 8 bytes of .bin"),
    ]
    for path, data, what in cases:
        for name, content in good.items():
            name.write_bytes(content)
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UserError) as error:
            IndexedDataset(prefix, checked=True)
        message = str(error.value)
        assert what in message and str(path.with_suffix("")) in message and "titans prepare" in message, message


def test_a_failed_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "a", 10) as writer:
        writer.add([1, 2])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_files_have_their_names_only_when_complete(tmp_path):
    writer = IndexedWriter(tmp_path / "a", 10)
    writer.add([1, 2])
    assert not (tmp_path / "a.bin").exists() and not (tmp_path / "a.idx").exists()
    writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.crc32", "a.idx"]


@pytest.mark.parametrize("full", [".bin.part", ".idx.part"])
def test_full_disk_leaves_nothing(tmp_path, monkeypatch, full):
    monkeypatch.setattr(indexed, "open", full_disk(full), raising=False)
    with pytest.raises(OSError, match="No space"), IndexedWriter(tmp_path / "a", 10) as writer:
        writer.add([1, 2])
    assert list(tmp_path.iterdir()) == []


def full_disk(suffix):
    """An ``open`` that fails on writes to files with this suffix."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fake(path, mode):
        file = open(path, mode)  # noqa: SIM115
        if str(path).endswith(suffix):
            return type(
                "Full",
                (),
                {
                    "write": refuse,
                    "flush": refuse,
                    "seek": lambda *_: None,
                    "close": lambda _: file.close(),
                    "__enter__": lambda self: self,
                    "__exit__": lambda *_: file.close(),
                },
            )()
        return file

    return fake


@pytest.mark.parametrize("ids", [[70_000], [3, -1], [10], np.array([70_000])], ids=str)
def test_an_id_that_does_not_fit_is_refused(tmp_path, ids):
    with pytest.raises(ValueError, match="a: ids from .+, must be 0 to 9"), IndexedWriter(tmp_path / "a", 10) as writer:
        writer.add(ids)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=20),
    st.sampled_from([1000, 100_000]),
)
def test_megatron_core_reads_what_is_written_here(tmp_path_factory, documents, vocab_size):
    """NVIDIA's own reader reads our files, with and without mmap."""
    prefix = write(tmp_path_factory.mktemp("indexed") / "train", documents, vocab_size)
    for mmap in (True, False):
        theirs = megatron.IndexedDataset(str(prefix), mmap=mmap)
        assert len(theirs) == len(documents)
        assert [theirs[i].tolist() for i in range(len(documents))] == documents
        assert theirs.document_indices.tolist() == list(range(len(documents) + 1))
        assert theirs.sequence_lengths.tolist() == [len(ids) for ids in documents]


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=4), min_size=1, max_size=9),
    st.sampled_from([np.uint16, np.int32]),
)
def test_what_megatron_core_writes_is_read_here(tmp_path_factory, documents, dtype):
    """Documents have one or more sentences, some of them empty."""
    prefix = tmp_path_factory.mktemp("indexed") / "theirs"
    builder = megatron.IndexedDatasetBuilder(str(prefix) + ".bin", dtype=dtype)
    for sentences in documents:
        joined = [token for sentence in sentences for token in sentence]
        builder.add_document(torch.tensor(joined, dtype=torch.int64), [len(sentence) for sentence in sentences])
    builder.finalize(str(prefix) + ".idx")
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == dtype and len(dataset) == sum(map(len, documents))
    assert [dataset.document(j).tolist() for j in range(len(documents))] == [
        [token for sentence in sentences for token in sentence] for sentences in documents
    ]


def test_checksums_stay_on_the_disk(tmp_path):
    """They are 4 GB for two trillion tokens, and each process of a node would hold them."""
    with IndexedWriter(tmp_path / "a", 100) as writer:
        writer.add(np.arange(100))
    assert isinstance(IndexedDataset(tmp_path / "a", checked=True)._pages, np.memmap)
    (tmp_path / "a.crc32").write_bytes(b"123")
    with pytest.raises(UserError, match=r"a\.crc32: "):
        IndexedDataset(tmp_path / "a", checked=True)
