"""Baselines that need no model: class frequencies, lengths, copies, and counts of short words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titans_pt.genomics.alphabet import FIRST, encoded
from titans_pt.genomics.sets import LabelledSet, Split, centre

KMERS = 5
"""Bases of the longest words that the regression counts."""
_MOST = 50_000
"""Most training sequences of the regression."""
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Factors of the squared weights; the best one on a tenth of the training sequences is taken."""
Predict = Callable[[Sequence[bytes]], np.ndarray]


def confusion(predicted: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """int64 (classes, classes): how many sequences of each class (rows) were predicted as each class (columns)."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def score(counts: np.ndarray) -> dict:
    """n, right, accuracy, and Matthews' correlation of any number of classes (Gorodkin 2004; 0 if undefined), from the
    counts of :func:`confusion`."""
    table = counts.astype(float)
    n, right, true, guessed = int(counts.sum()), np.trace(table), table.sum(1), table.sum(0)
    below = np.sqrt((n**2 - (guessed**2).sum()) * (n**2 - (true**2).sum()))
    mcc = float((right * n - (true * guessed).sum()) / below) if below else 0.0
    return {"n": n, "right": int(right), "accuracy": float(right / n) if n else None, "mcc": mcc}


def distinct(given: LabelledSet) -> np.ndarray:
    """Mask of the test sequences that are no copies of training sequences, bool (test,)."""
    known = set(given.train.sequences)
    return np.array([sequence not in known for sequence in given.test.sequences], bool)


@dataclass(frozen=True)
class Column:
    """A column of the results: training sequences and test sequences, perhaps cut or without copies."""

    name: str
    train: Split
    test: Split


def columns(given: LabelledSet, middle: int) -> list[Column]:
    """The columns of a set.

    test: the whole test.
    distinct: the test without copies of training sequences, if there are copies.
    middle: training and test sequences cut to their middle bases, if that shortens any; lengths tell less then.
    """
    found = [Column("test", given.train, given.test)]
    if not (new := distinct(given)).all() and new.any():
        kept = [sequence for sequence, is_new in zip(given.test.sequences, new, strict=True) if is_new]
        found.append(Column("distinct", given.train, Split(kept, given.test.labels[new])))
    if any(len(sequence) > middle for split in (given.train, given.test) for sequence in split.sequences):
        cut = [Split([centre(s, middle) for s in split.sequences], split.labels) for split in (given.train, given.test)]
        found.append(Column("middle", *cut))
    return found


def baselines(given: LabelledSet, middle: int) -> dict[str, dict[str, dict]]:
    """Baseline -> column -> its :func:`score`. Each learns from training sequences alone."""
    classes, found = len(given.classes), {}  # type: int, dict[str, dict[str, dict]]
    kinds = {"majority": majority, "length": by_length, "look-up": by_copy, f"{KMERS}-mer regression": by_words}
    for name, learn in kinds.items():
        learnt: dict[int, Predict] = {}
        for column in columns(given, middle):
            if id(column.train) not in learnt:
                learnt[id(column.train)] = learn(column.train, classes)
            predicted = learnt[id(column.train)](column.test.sequences)
            counts = confusion(predicted, column.test.labels, classes)
            found.setdefault(name, {})[column.name] = score(counts)
    return found


def majority(train: Split, classes: int) -> Predict:
    """Predict the most frequent class."""
    best = int(np.bincount(train.labels, minlength=classes).argmax())
    return lambda sequences: np.full(len(sequences), best)


def by_length(train: Split, classes: int) -> Predict:
    """Predict the most frequent class of a sequence's length; of all sequences if training lacks the length."""
    return _by_key(train, classes, len)


def by_copy(train: Split, classes: int) -> Predict:
    """Predict the most frequent class of equal training sequences; of all sequences if none is equal."""
    return _by_key(train, classes, lambda sequence: sequence)


def _by_key(train: Split, classes: int, key: Callable) -> Predict:
    """Predict the most frequent class of training sequences with the same key; of all sequences if there is none."""
    counts: dict = {}
    for sequence, label in zip(train.sequences, train.labels, strict=True):
        counts.setdefault(key(sequence), np.zeros(classes, np.int64))[label] += 1
    other = int(np.bincount(train.labels, minlength=classes).argmax())
    best = {entry: int(found.argmax()) for entry, found in counts.items()}
    return lambda sequences: np.array([best.get(key(sequence), other) for sequence in sequences], np.int64)


def by_words(train: Split, classes: int) -> Predict:
    """Predict by multinomial logistic regression on the frequencies of words of one to five bases.

    A frequency is a share of the sequence's words of the same length, standardised. At most 50,000 sequences are used.
    """
    draw = np.random.RandomState(0).permutation(len(train.labels))[:_MOST]
    x, y = words([train.sequences[i] for i in draw]), torch.from_numpy(train.labels[draw])
    mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
    x = (x - mean) / scale
    held_out = max(1, len(y) // 10)

    def right(penalty: float) -> float:
        weight, bias = _fit(x[held_out:], y[held_out:], classes, penalty)
        return float(((x[:held_out] @ weight + bias).argmax(1) == y[:held_out]).float().mean())

    weight, bias = _fit(x, y, classes, max(_PENALTIES, key=right))
    return lambda sequences: (((words(sequences) - mean) / scale) @ weight + bias).argmax(1).numpy()


def words(sequences: Sequence[bytes]) -> Tensor:
    """(N, 4 + 16 + ... + 4^5) fp32: shares of the words; words with an N do not count."""
    found = np.zeros((len(sequences), sum(4**k for k in range(1, KMERS + 1))), np.float32)
    for row, sequence in enumerate(sequences):
        ids = encoded(sequence).astype(np.int64) - FIRST
        known, codes, first = ids < 4, np.zeros(len(ids), np.int64), 0
        whole = np.ones(len(ids), bool)
        for k in range(1, min(KMERS, len(ids)) + 1):
            codes = codes[: len(ids) - k + 1] * 4 + ids[k - 1 :]
            whole = whole[: len(ids) - k + 1] & known[k - 1 :]
            counts = np.bincount(codes[whole], minlength=4**k)
            found[row, first : first + 4**k] = counts / max(1, counts.sum())
            first += 4**k
    return torch.from_numpy(found)


def _fit(x: Tensor, y: Tensor, classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((x.shape[1], classes), (classes,)))
    optimizer = torch.optim.LBFGS(
        [weight, bias], history_size=10, line_search_fn="strong_wolfe", max_iter=60, tolerance_grad=1e-4,
        tolerance_change=1e-7,
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, y) + penalty * weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()
