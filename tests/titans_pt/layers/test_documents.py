"""Documents' starts and bounds against a loop over tokens."""

import pytest
import torch

from titans_pt.layers.documents import Documents

B, T = 3, 23


def by_hand(reset):
    """Return begin (B, T), and the starts of rows and documents with the rows laid end to end."""
    begin, bounds = torch.full(reset.shape, -1), []
    for row in range(reset.shape[0]):
        for t in range(reset.shape[1]):
            if reset[row, t]:
                begin[row, t:] = t
            if reset[row, t] or t == 0:
                bounds.append(row * reset.shape[1] + t)
    return begin, bounds


def check(documents, reset):
    begin, bounds = by_hand(reset)
    rows, length = reset.shape
    assert torch.equal(documents.starts, reset) and torch.equal(documents.begin, begin)
    assert documents.bounds.dtype == torch.int32 and len(documents.bounds) == rows * min(documents.most + 1, length) + 1
    assert documents.bounds.tolist() == bounds + [rows * length] * (len(documents.bounds) - len(bounds))
    assert documents.most >= reset.sum(1).max()


@pytest.mark.parametrize("share, most", [(0.0, 8), (0.1, 8), (0.4, 16), (1.0, 32)])
def test_by_hand(share, most):
    reset = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < share
    documents = Documents.of(reset, torch.device("cpu"))
    check(documents, reset)
    assert documents.most == most
    for begin, end in [(0, T), (0, 1), (5, 17), (T - 2, T)]:
        check(documents.cut(begin, end), reset[:, begin:end])
