"""Perplexity by streams equals one direct computation; buckets, bytes and documents are counted right."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from tests.helpers.stand_ins import Recurrent
from tests.helpers.untrained import untrained_run
from titans_pt.config.files import load_config
from titans_pt.data_pipeline import IndexedDataset, IndexedWriter, load_tokenizer, saved_tokenizer
from titans_pt.errors import UserError
from titans_pt.evaluation import perplexity
from titans_pt.layers.memory_gates import MemoryGates
from titans_pt.runs.loaded import load_run

TOKENS, LENGTH = 200, 64
RECURRENT = Recurrent().eval()


def direct(model, ids):
    """Losses of all tokens from one call, float64 (T - 1,)."""
    with torch.no_grad():
        logits, _ = model(torch.tensor(ids[None, :-1]))
    return F.cross_entropy(logits[0], torch.tensor(ids[1:]), reduction="none").double().numpy()


@given(length=st.integers(2, 60), piece=st.integers(1, 70))
@settings(max_examples=25, deadline=None)
def test_losses_in_pieces_equal_one_call(length, piece):
    ids = np.arange(length) * 31 % 128
    found = perplexity.token_losses(RECURRENT, torch.tensor(ids), piece)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, direct(RECURRENT, ids), rtol=1e-4)


def measured(run, *overrides):
    torch.manual_seed(0)
    run.model = Recurrent().eval()
    config = load_config(run.folder.config, ["evaluation.prefill_tokens=25", *overrides])
    it = perplexity.Perplexity(run, config)
    return it, [it.measure(i) for i in range(len(it.keys))]


def test_equals_a_direct_computation(run):
    it, records = measured(run)
    summary = it.summary(records)
    stream = it.validation.read(0, TOKENS + 1).astype(np.int64)
    parts = [direct(run.model, stream[start : min(start + LENGTH, TOKENS) + 1]) for start in range(0, TOKENS, LENGTH)]
    losses = np.concatenate(parts)
    assert len(parts) == len(records) == summary["streams"] == 4 and len(parts[-1]) == 8
    assert summary["tokens"] == TOKENS == len(losses)
    assert summary["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert summary["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    assert summary["bytes"] == sum(stream[1:] != 0)
    assert summary["bits_per_byte"] == pytest.approx(losses.sum() / math.log(2) / summary["bytes"], rel=1e-6)
    assert summary["unigram_loss"] == 3.3

    rows = summary["positions"]
    assert [(row["first"], row["last"]) for row in rows] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64)
    ]  # fmt: skip
    assert sum(row["n"] for row in rows) == TOKENS
    for row in rows:
        values = np.concatenate([part[row["first"] - 1 : row["last"]] for part in parts])
        assert row["n"] == len(values) and row["mean"] == pytest.approx(values.mean(), rel=1e-6)
        assert row["stderr"] == pytest.approx(values.std(ddof=1) / len(values) ** 0.5, rel=1e-4)


CHINESE = "\u5929\u5730\u7384\u9ec4\uff0c\u5b87\u5b99\u6d2a\u8352\u3002\U0001f600 caf\u00e9"
"""Byte pieces: two to four tokens a character."""


@pytest.mark.parametrize("dummy_prefix", [False, True])
@pytest.mark.parametrize("length", [7, 8, 1000])
def test_bytes_are_those_of_the_text_itself(run, sentencepiece, length, dummy_prefix, tmp_path):
    tokenizer = sentencepiece
    if dummy_prefix:  # as Llama's
        (tmp_path / "text").write_text("the text of a tokenizer that has seen no Chinese\n" * 20)
        SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "llama"), vocab_size=285,
                                   model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
                                   remove_extra_whitespaces=False, minloglevel=2)  # fmt: skip
        tokenizer = load_tokenizer(tmp_path / "llama.model")
    assert tokenizer.dummy_prefix == dummy_prefix
    texts = [CHINESE * 3, " two words", CHINESE, "x"]
    documents = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    with IndexedWriter(tmp_path / "chinese", tokenizer.vocab_size) as writer:
        for ids in documents:
            writer.add(ids)
    files = perplexity.TokenFiles.open(None)
    files.validation, files.manifest["tokenizer_sha256"] = IndexedDataset(tmp_path / "chinese"), tokenizer.sha256
    run.tokenizer = files.tokenizer = tokenizer
    config = load_config(run.folder.config, [f"evaluation.perplexity.length={length}"])
    it = perplexity.Perplexity(run, config)
    records = [{"start": start, "freeze_after": None, "n": 1, "nats": 1.0, "bytes": 99, "tokens_per_s": 1.0,
                "positions": [[1, 1.0, 1.0]]} for start, _ in it.jobs]  # fmt: skip
    summary = it.summary(records)
    scored = sum(len(text.encode()) for text in texts)  # the first token of all is bos, which has no text
    assert summary["bytes"] == scored and it.tokens == sum(map(len, documents)) - 1
    assert summary["bits_per_byte"] == pytest.approx(len(records) / math.log(2) / scored)


def test_one_token_has_no_stderr(run):
    it, records = measured(run, "evaluation.perplexity.tokens=1")
    summary = it.summary(records)
    assert summary["positions"] == [{"first": 1, "last": 1, "mean": records[0]["nats"], "n": 1, "stderr": None}]
    assert " - " in it.table(summary)


def test_a_frozen_memory_is_one_that_is_not_written(tmp_path, prepared):
    """Frozen from the start: equal to a model built without writes. Frozen later: equal to a live one up to there."""
    run = load_run(untrained_run(tmp_path / "run", prepared))
    off = load_run(untrained_run(tmp_path / "off", prepared, memory={"writes": False}))
    ids = torch.arange(60) * 7 % 256
    live, never = (perplexity.token_losses(r.model, ids, 16) for r in (run, off))
    assert torch.equal(perplexity.token_losses(run.model, ids, 16, freeze_after=0), never)
    assert torch.equal(perplexity.token_losses(run.model, ids, 16, freeze_after=1000), live)
    for freeze in (1, 20, 33):
        found = perplexity.token_losses(run.model, ids, 16, freeze_after=freeze)
        torch.testing.assert_close(found[:freeze], live[:freeze], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found[freeze:], live[freeze:])
    gates = [m for m in run.model.modules() if isinstance(m, MemoryGates)]
    assert gates and all(gate.writes for gate in gates)


def test_nothing_moves_in_a_frozen_memory(tmp_path, prepared):
    model = load_run(untrained_run(tmp_path / "run", prepared, mixers=["lmm"])).model
    ids = torch.arange(40)[None]
    with torch.no_grad():
        _, before = model(ids)
        with perplexity.frozen_memory(model):
            _, after = model(ids, before)
    for old, new in zip(before.blocks[0].memory.weights, after.blocks[0].memory.weights, strict=True):
        assert torch.equal(old, new)


def test_frozen_variants_are_scored_with_the_live_one(run):
    it, records = measured(run, "evaluation.perplexity.freeze_after=[100, 0]")
    summary = it.summary(records)
    assert len(records) == 12 and len(set(it.keys)) == 12
    plain, alone = measured(run)
    assert it.keys[:4] == plain.keys and summary["loss"] == plain.summary(alone)["loss"]
    assert [row["after"] for row in summary["frozen"]] == [0, 100]
    off, frozen = (f"{row['loss']:.4f}" for row in summary["frozen"])
    line = f"  memory: loss {summary['loss']:.4f} on, {off} off, {frozen} frozen after 100 tokens (the same text)"
    assert line in it.table(summary)
    assert summary["by_length"][-1]["loss"] == pytest.approx(summary["loss"])


def test_a_model_without_a_memory_has_nothing_to_freeze(run, caplog):
    words = ["model.mixers=[swa,ttt_linear]", "evaluation.perplexity.freeze_after=[0]"]
    run.model = Recurrent().eval()
    run.config = load_config(run.folder.config, words)
    it = perplexity.Perplexity(run, run.config)
    assert it.variants == [None] and {freeze for _, freeze in it.jobs} == {None}
    assert "evaluation.perplexity.freeze_after=[0] has no effect: no mixer of this model (swa, ttt_" in caplog.text


def test_a_short_last_stream_counts_as_little_as_it_holds(run):
    whole, whole_records = measured(run, "evaluation.perplexity.tokens=300", "evaluation.perplexity.length=100")
    more, more_records = measured(run, "evaluation.perplexity.tokens=301", "evaluation.perplexity.length=100")
    assert [record["n"] for record in more_records] == [100, 100, 100, 1]
    errors = whole.summary(whole_records)["stderr"], more.summary(more_records)["stderr"]
    assert errors[1] == pytest.approx(errors[0], rel=0.25)


def test_stops_at_the_end_of_the_text(run):
    it, records = measured(run, "evaluation.perplexity.tokens=100000", "evaluation.perplexity.length=150")
    assert it.validation.tokens == 320 and [record["n"] for record in records] == [150, 150, 19]
    assert "319 validation tokens in 3 streams of 150" in it.table(it.summary(records))


def test_without_text(run):
    run.folder.config.write_text("")
    perplexity.TokenFiles.open(None).validation.tokens = 1
    with pytest.raises(UserError, match=r"data\.dir.*validation"):
        measured(run)


def test_of_another_tokenizer(run):
    perplexity.TokenFiles.open(None).manifest["tokenizer_sha256"] = "other"
    with pytest.raises(UserError, match=r"data\.dir.*another tokenizer"):
        measured(run)


def test_of_the_same_tokenizer_with_another_eos(run):
    perplexity.TokenFiles.open(None).tokenizer.eos_id = 5
    with pytest.raises(UserError, match=r"data\.dir.*another eos, than the run's"):
        measured(run)


def test_another_text_with_or_without_bos(run, prepared, caplog):
    """The loss of bos, or of texts without it, is not what training reached: it is scored, with a warning."""
    run.tokenizer = load_tokenizer(saved_tokenizer(prepared), add_bos=True)
    config = load_config(run.folder.config, [f"evaluation.perplexity.text={prepared}"])
    perplexity.Perplexity(run, config)
    assert "begin without bos, those of the run's training with it" in caplog.text
    caplog.clear()
    run.tokenizer = load_tokenizer(saved_tokenizer(prepared))
    perplexity.Perplexity(run, config)
    assert not caplog.text


def test_another_text(run, prepared, tmp_path):
    """The folder's validation tokens are scored. Its sources may differ from the run's, its tokenizer may not."""
    path = saved_tokenizer(prepared)
    with pytest.raises(UserError, match=r"evaluation\.perplexity\.text: .* of another tokenizer, .* than the run's"):
        measured(run, f"evaluation.perplexity.text={prepared}")
    run.tokenizer = load_tokenizer(path)
    it = perplexity.Perplexity(run, load_config(run.folder.config, [f"evaluation.perplexity.text={prepared}"]))
    assert it.validation.prefix == prepared / "validation" and len(it.keys) == len(set(it.keys)) > 0
    with pytest.raises(
        UserError, match=r"evaluation\.perplexity\.text: .*nothing holds no token files; .* titans prepare"
    ):
        measured(run, f"evaluation.perplexity.text={tmp_path / 'nothing'}")


def test_documents_reset_the_state_when_they_did_in_training(run):
    seen = []

    class Watching(Recurrent):
        def forward(self, ids, state=None, reset=None, last_only=False):
            seen.append(None if reset is None else reset[0])
            return super().forward(ids, state)

    run.model = Watching().eval()
    for setting in ("true", "false"):
        config = load_config(run.folder.config, [f"data.reset_at_documents={setting}", "evaluation.prefill_tokens=100"])
        perplexity.Perplexity(run, config).measure(1)
    # Stream 1 is tokens 64 to 128, and the second document begins at 90.
    assert seen[0].nonzero().tolist() == [[26]] and seen[1] is None


def test_keys_depend_on_the_text_and_the_checkpoint(run):
    it, _ = measured(run)
    assert len(set(it.keys)) == 4
    run.checkpoint_hash = "other"
    assert not set(it.keys) & set(perplexity.Perplexity(run, run.config).keys)


@given(st.lists(st.floats(0, 20), max_size=40))
@settings(max_examples=30, deadline=None)
def test_position_sums_cover_all_once(losses):
    sums = perplexity.position_sums(np.array(losses))
    assert sum(n for n, _, _ in sums) == len(losses)
    assert math.fsum(total for _, total, _ in sums) == pytest.approx(math.fsum(losses))
    assert [n for n, _, _ in sums[:-1]] == [1, 1, 2, 4, 8, 16, 32][: max(0, len(sums) - 1)]
