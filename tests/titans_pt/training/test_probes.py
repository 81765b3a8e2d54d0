"""The training probe against titans inspect, which has its own tests against the states."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from tests.titans_pt.parallel.test_split import on_ranks
from tests.titans_pt.test_inspection import CASES, small
from titans_pt.inspection import inspector
from titans_pt.parallel import TensorParallel
from titans_pt.training.probes import SURPRISE_TOKENS, memory_probe

T = 43


@pytest.mark.parametrize("case", CASES)
def test_surprise_is_that_of_the_first_samples_last_tokens(case):
    mixers, memory = CASES[case]
    model = small(mixers, **memory)
    ids = torch.randint(0, 50, (3, T), generator=torch.Generator().manual_seed(1))
    with memory_probe(model.train()) as means:
        logits, _ = model(ids)
        model(ids.flip(0))  # a second micro-batch: surprise is the first one's
        found = means()
    logits.sum().backward()
    assert not any(m._forward_hooks for m in model.modules())
    expected = inspector.read(model.eval(), ids[0], ["x"] * T)
    counts = [min(SURPRISE_TOKENS, T % 8 if model.config.pattern[int(name.split(".")[1])] == "mac" else T)
              for name in expected.memories]  # fmt: skip
    surprise = np.mean([figures[-n:].mean() for figures, n in zip(expected.surprise, counts, strict=True)])
    np.testing.assert_allclose(found["surprise"], surprise, rtol=1e-5)


@pytest.mark.parametrize("mixer", ["lmm", "mal"])
def test_gates_are_means_over_the_texts_tokens_however_it_is_cut(mixer):
    """Persistent tokens do not count, and a piece counts by its tokens."""
    model = small([mixer])
    assert model.config.persistent_tokens
    ids = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(3))
    figures = [inspector.read(model.eval(), row, ["x"] * T) for row in ids]
    for pieces in ([T], [5, T - 5]):
        with memory_probe(model) as means, torch.no_grad():
            state = None
            for piece in ids.split(pieces, 1):
                _, state = model(piece, state)
        for name in ("theta", "eta", "alpha"):
            expected = np.mean([getattr(each, name) for each in figures])
            np.testing.assert_allclose(means()[name], expected, rtol=1e-5, err_msg=name)


def test_tensor_ranks_report_the_heads_of_all():
    model = small(["lmm", "mac"])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    ids = torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(4))
    with memory_probe(model) as means, torch.no_grad():
        model(ids)
    copies = [deepcopy(model) for _ in range(2)]

    def rank(group):
        part = copies[group.rank]
        TensorParallel(part, group)
        with memory_probe(part, tensor=group) as found, torch.no_grad():
            part(ids)
            return found()

    expected = means()
    assert {"theta", "memory_norm", "surprise"} <= expected.keys()
    for found in on_ranks(2, rank):
        assert found == pytest.approx(expected, rel=1e-4)


def test_documents_that_end_within_the_sample():
    model = small(["lmm"])
    ids = torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(2))
    reset = torch.zeros(1, T, dtype=torch.bool)
    reset[0, [9, T - 5]] = True
    with memory_probe(model) as means:
        model(ids, reset=reset)
    pieces = [inspector.read(model, part, ["x"] * len(part)).surprise for part in ids[0].split([9, T - 14, 5])]
    together = np.concatenate(pieces, axis=1)[:, -SURPRISE_TOKENS:]
    np.testing.assert_allclose(means()["surprise"], together.mean(), rtol=1e-5)


def test_what_a_model_returns_beside_its_outputs_does_not_matter():
    """A task's own model need not return its states."""
    model = small(["lmm"])
    ids = torch.zeros(1, 9, dtype=torch.int64)
    with memory_probe(model) as whole:
        model(ids)
    model.register_forward_hook(lambda _model, _given, result: result[0])
    with memory_probe(model) as outputs:
        model(ids)
    assert outputs() == whole() and whole()["memory_norm"] > 0


def test_a_model_without_memory_has_no_means():
    model = small(["attention"])
    with memory_probe(model) as means:
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert means() == {}
