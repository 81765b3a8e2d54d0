"""Reading a long prompt continues where it was killed."""

import pytest
import torch

from tests.helpers.untrained import untrained_run
from titans_pt.evaluation import long_context
from titans_pt.runs.loaded import load_run
from titans_pt.streaming import prefill


class Killed(Exception):
    pass


def test_a_killed_reading_goes_on(tmp_path, prepared, monkeypatch, caplog):
    model = load_run(untrained_run(tmp_path / "run", prepared)).model
    ids, path = torch.arange(100, dtype=torch.int32)[None], tmp_path / "kept" / "reading.safetensors"
    logits, state = prefill(model, ids, 16)
    calls = []

    def dies(*arguments, last):
        calls.append(arguments[1].shape[1])
        if len(calls) == 3:
            raise Killed
        return prefill(*arguments)

    monkeypatch.setattr(long_context, "read_prompt", dies)
    with pytest.raises(Killed):
        long_context.read(model, ids, 16, 30, path)
    assert path.exists()
    reading = long_context.read(model, ids, 16, 30, path)
    assert calls == [30, 30, 30, 30, 10] and not path.exists()
    assert [row["tokens"] for row in reading.stretches] == [30, 60, 90, 100]
    assert all(row["tokens_per_s"] > 0 and row["peak_memory"] > 0 for row in reading.stretches)
    torch.testing.assert_close(reading.logits, logits)
    more = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(more, reading.state)[0], model(more, state)[0])
    path.write_bytes(b"damaged")
    reading = long_context.read(model, ids, 16, 30, path)
    assert [row["tokens"] for row in reading.stretches] == [30, 60, 90, 100] and not path.exists()
    assert "read again from the first token" in caplog.text and "titans generate" not in caplog.text
    torch.testing.assert_close(reading.logits, logits)


def test_a_short_prompt_leaves_nothing(tmp_path, prepared):
    model = load_run(untrained_run(tmp_path / "run", prepared)).model
    reading = long_context.read(model, torch.arange(20)[None], 7, 30, tmp_path / "x")
    assert len(reading.stretches) == 1 and not (tmp_path / "x").exists()
