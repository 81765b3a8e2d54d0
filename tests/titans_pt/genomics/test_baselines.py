"""Baselines of a labelled set, on sets for which they are known by hand."""

import numpy as np
import pytest
import torch

from titans_pt.errors import UserError
from titans_pt.genomics import prepared
from titans_pt.genomics.baselines import baselines, columns, confusion, score, words
from titans_pt.genomics.sets import LabelledSet, Split


def made(train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> LabelledSet:
    splits = [Split([s for s, _ in rows], np.array([label for _, label in rows])) for rows in (train, test)]
    return LabelledSet(("a", "b"), *splits)


def test_scores():
    assert score(confusion(np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]), 2)) == {
        "n": 4, "right": 3, "accuracy": 0.75, "mcc": pytest.approx(2 / (2 * 1 * 2 * 3) ** 0.5),
    }  # fmt: skip
    assert score(confusion(np.zeros(3, int), np.array([0, 1, 2]), 3))["mcc"] == 0.0
    assert score(confusion(np.array([0, 1, 2]), np.array([0, 1, 2]), 3))["mcc"] == pytest.approx(1.0)


def test_majority_lengths_and_copies():
    train = [(b"A" * 10, 0), (b"C" * 10, 0), (b"G" * 6, 1), (b"ACGTACGT", 1), (b"T" * 10, 0)]
    test = [(b"G" * 10, 0), (b"T" * 6, 1), (b"ACGTACGT", 1), (b"C" * 9, 1)]
    given = made(train, test)
    found = baselines(given, middle=8)
    right = {name: {column: row["right"] for column, row in by.items()} for name, by in found.items()}
    assert right["majority"] == {"test": 1, "distinct": 1, "middle": 1}
    assert right["length"] == {"test": 3, "distinct": 2, "middle": 2}, "8 of ten bases tell no length of ten"
    assert right["look-up"] == {"test": 2, "distinct": 1, "middle": 2}, "copies tell one, and none of the distinct"
    assert [column.name for column in columns(given, 10)] == ["test", "distinct"]
    middle = columns(given, 4)[2]
    assert middle.test.sequences == [b"GGGG", b"TTTT", b"GTAC", b"CCCC"] and len(middle.train.sequences[0]) == 4


def test_words_are_shares_and_those_with_an_unknown_base_count_nowhere():
    (row,) = words([b"ACANA"]).numpy()
    assert row[:4].tolist() == [0.75, 0.25, 0, 0]
    pairs = row[4:20].reshape(4, 4)
    assert pairs[0, 1] == 0.5 and pairs[1, 0] == 0.5 and pairs.sum() == 1
    assert row[20:84].sum() == 1 and row[84:].sum() == 0


def test_regression_on_words_learns_what_words_tell():
    draw = np.random.default_rng(0)

    def sequence(label: int) -> bytes:
        bases = draw.choice(list("ACGT"), 60)
        if label:
            bases[20:24] = list("GATC")
        return "".join(bases).encode()

    torch.manual_seed(0)
    rows = [(sequence(n % 2), n % 2) for n in range(900)]
    found = baselines(made(rows[:600], rows[600:]), 200)
    assert found["5-mer regression"]["test"]["accuracy"] > 0.7 > 0.55 > found["length"]["test"]["accuracy"]


def test_a_set_is_written_read_and_its_damage_noticed(tmp_path):
    given = made([(b"ACGTN", 0), (b"GG", 1)], [(b"GG", 1), (b"T", 0)])
    manifest = prepared.write(tmp_path, given, 200, {"set": None}, [])
    found = prepared.read(tmp_path)
    assert found.given.train.sequences == [b"ACGTN", b"GG"] and found.given.test.labels.tolist() == [1, 0]
    assert found.sha256 == manifest["sha256"] and manifest["copies"] == 1 and manifest["lengths"]["train"] == [2, 3, 5]
    assert "copies of training ones: 1" in prepared.told(manifest, tmp_path)
    np.savez_compressed(tmp_path / "sequences.npz", **(dict(np.load(tmp_path / "sequences.npz"))
                                                       | {"test_labels": np.array([0, 0], np.int16)}))  # fmt: skip
    with pytest.raises(UserError, match="sequences.npz: damaged .*; make it again with: titans prepare CONFIG --force"):
        prepared.read(tmp_path)
    whole = (tmp_path / "sequences.npz").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:60] + bytes(60) + whole[120:]):
        (tmp_path / "sequences.npz").write_bytes(damaged)
        with pytest.raises(UserError, match="sequences.npz: damaged"):
            prepared.read(tmp_path)
    (tmp_path / "set.json").unlink()
    with pytest.raises(UserError, match="holds no labelled sequences; run: titans prepare CONFIG"):
        prepared.read(tmp_path)
