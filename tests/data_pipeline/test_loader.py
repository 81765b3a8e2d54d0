import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_pipeline.streams import dataset
from titans_pt.data_pipeline import Loader, PackedSamples
from titans_pt.errors import UserError


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
        list(loader.batches(consumed - batch) if consumed >= batch else ())  # makes it read ahead
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


@pytest.mark.parametrize(
    ("batch", "micro", "world", "parts"),
    [
        (12, 8, 1, ["train.batch_tokens=120", "train.micro_batch=8", "1 ranks", "set train.micro_batch=6", "=160"]),
        (12, 4, 2, ["train.micro_batch=3", "train.batch_tokens=160"]),
        (10, 2, 4, ["4 ranks", "set train.batch_tokens=160"]),
        (2, 4, 4, ["set train.batch_tokens=160"]),
    ],
)
def test_indivisible_batch(batch, micro, world, parts):
    samples = PackedSamples(dataset([200]), 10, seed=0)
    with pytest.raises(UserError) as error:
        Loader(samples, micro, 0, world, batch)
    for part in parts:
        assert part in str(error.value), str(error.value)
