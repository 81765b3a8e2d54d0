"""Sketches estimate the similarity of two documents, and pairs above the threshold are found."""

import numpy as np
import pytest

from titans_pt.data_pipeline import near_duplicates as it

pytest.importorskip("rensa")


def documents(draw, shared: float, count: int = 2, length: int = 1000) -> list[np.ndarray]:
    """Documents that start alike; ``shared`` is the Jaccard similarity of their sequences."""
    common = round(2 * shared / (1 + shared) * length)
    head = draw.integers(0, 30_000, common)
    return [np.concatenate([head, draw.integers(0, 30_000, length - common)]).astype(np.uint16) for _ in range(count)]


@pytest.mark.parametrize("shared", [0.1, 0.5, 0.8, 0.95])
def test_places_agree_as_often_as_sequences_are_shared(shared):
    draw = np.random.default_rng(0)
    pairs = [it.sketch(documents(draw, shared)) for _ in range(200)]
    assert np.mean([(a == b).mean() for a, b in pairs]) == pytest.approx(shared, abs=0.015)


def test_a_sketch_is_of_the_document_alone():
    draw = np.random.default_rng(1)
    some = [draw.integers(0, 300, n).astype(np.uint16) for n in (1, 4, 5, 6, 200, 3000)]
    together = it.sketch(some)
    assert together.dtype == np.uint32 and together.shape == (6, it.PLACES)
    for row, ids in zip(together, some, strict=True):
        assert np.array_equal(it.sketch([ids.astype(np.int32)])[0], row)
    assert len(np.unique(together, axis=0)) == 6


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_what_is_alike_is_found_and_nothing_else(threshold, tmp_path):
    draw = np.random.default_rng(2)
    like = [documents(draw, min(1.0, threshold + 0.1), 3) for _ in range(50)]
    unlike = [documents(draw, threshold - 0.2, 3) for _ in range(50)]
    together = [ids for group in (*like, *unlike) for ids in group]
    path = tmp_path / "sketches"
    it.sketch(together).tofile(path)
    duplicate = np.zeros(len(together), np.uint8)
    duplicate[1] = 1  # equal to the first, and already known
    found = it.mark(path, duplicate, threshold)
    assert found == duplicate.sum() - 1
    groups = duplicate.reshape(100, 3)
    assert groups[:50, 1:].mean() > 0.98 and not groups[:50, 0].any() and not groups[50:].any()


def test_documents_of_one_chat_are_kept_or_dropped_together(tmp_path):
    draw = np.random.default_rng(3)
    first, other = documents(draw, 0.95, 4), documents(draw, 0.95, 1)
    sketches = it.sketch([*first[:2], *other, *first[2:]])
    sketches[[0, 3]] = 0  # chats of two, one and two documents
    sketches.tofile(tmp_path / "sketches")
    duplicate = np.zeros(5, np.uint8)
    assert it.mark(tmp_path / "sketches", duplicate, 0.8) == 2 and duplicate.tolist() == [0, 0, 0, 1, 1]


def test_the_width_of_a_band():
    assert [it.band_width(t) for t in (0.5, 0.8, 0.9, 1.0)] == [2, 4, 8, 128]


def test_no_documents(tmp_path):
    (tmp_path / "sketches").write_bytes(b"")
    assert it.mark(tmp_path / "sketches", np.zeros(1, np.uint8), 0.8) == 0
