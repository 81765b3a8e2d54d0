"""Supervised fine-tuning: rows of whole documents, of which the answers alone are trained."""

import json
import re

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.helpers.chats import SIZE, byte_tokenizer, said
from tests.helpers.trainings import check_resume
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tasks.answers import equal_samples
from titans_pt.training import loop

pytestmark = pytest.mark.usefixtures("one_group")

PAIRS = [{"prompt": f"{'x' * (i % 9)}{i}?", "completion": f" {i % 7}"} for i in range(80)]


@pytest.fixture
def configured(tmp_path, tiny):
    """configured(*words): a config whose training and validation text is PAIRS, prepared."""
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    source = f"{{kind: files, path: {tmp_path / 'pairs.jsonl'}, format: prompt-completion}}"
    words = [
        "task=sft", f"data.dir={tmp_path / 'data'}", f"data.sources=[{source}]", "data.validation_fraction=0.3",
        f"data.tokenizer.path={byte_tokenizer(tmp_path / 'tokenizer')}", f"model.vocab_size={SIZE}",
        "data.seq_len=32", "train.batch_tokens=64", "train.micro_batch=1", "train.max_steps=4", "train.warmup_steps=1",
        "train.log_every=1", "train.eval_every=2", "train.eval_samples=2", "train.checkpoint_every=2",
        "model.mixers=[lmm]", "model.memory.chunk_size=8",
    ]  # fmt: skip
    config = tiny()

    def make(*more, prepare=True):
        loaded = load_config(config, [*words, *more])
        if prepare:
            assert cli.run(["prepare", str(config), *words, *more]) == 0
        return loaded

    return make


def documents_of(task, row):
    """Text of each document of a row -> text of its answer."""
    ids, reset, asked = row
    found, starts = {}, [*np.flatnonzero(reset), len(reset)]
    for start, stop in zip(starts, starts[1:], strict=False):
        before = np.flatnonzero(asked[start:stop]) + start
        if len(before):
            last = np.flatnonzero(ids[start:stop] == task.tokenizer.eos_id)[-1] + start
            assert last == before[-1] + 1 and np.array_equal(before, np.arange(before[0], last))
            found[task.tokenizer.decode(ids[start:last].tolist())] = task.tokenizer.decode(ids[before + 1].tolist())
    return found


def test_every_document_is_read_once_an_epoch_whole_and_its_completion_is_trained(configured):
    task = task_of(configured())
    data = task.open()
    whole = {}
    for samples in (data.train, data.validation):
        for epoch in range(2):
            found = {}
            for position in range(epoch * len(samples), (epoch + 1) * len(samples)):
                here = documents_of(task, samples.sample(position))
                assert len(here) == len(samples.describe(position)["documents"]) and not here.keys() & found
                found |= here
            whole |= found
    assert whole == {row["prompt"] + row["completion"]: row["completion"] for row in PAIRS}
    ids, reset, asked = data.train.sample(0)
    assert ids.shape == (33,) and reset.shape == asked.shape == (32,) and reset[0]


def test_the_order_is_a_function_of_seed_and_position(configured):
    every = [task_of(configured(f"run.seed={seed}")).open().train for seed in (1, 1, 2)]
    rows = [[each.sample(p)[0].tobytes() for p in range(2 * len(each))] for each in every]
    assert rows[0] == rows[1] != rows[2] and sorted(rows[0]) == sorted(rows[2])
    assert rows[0][: len(every[0])] != rows[0][len(every[0]) :]


def test_the_loss_is_that_of_the_completions(configured):
    """Equal to the cross-entropy at the completions of each document read alone, the mean over a row's tokens.

    Also in full rows of a longer and a shorter document, whose starts look like those of equal samples and a rest."""
    task = task_of(configured("train.precision=fp32"))
    data, torch_seed = task.open(), torch.manual_seed(0)
    assert torch_seed
    model = task.build_model().eval()
    from titans_pt.parallel import RankGroup

    objective = task.objective(model, RankGroup(0, 1))
    layouts = set()
    for position in range(len(data.train)):
        ids, reset, asked = (torch.from_numpy(part)[None] for part in data.train.sample(position))
        layouts.add(equal_samples(reset))
        found = objective(ids, reset, asked, weight=torch.ones(1))
        losses = []
        for document in data.train.row(position):
            own = torch.from_numpy(data.train.dataset.document(document).astype(np.int64))[None]
            logits = model(own)[0].log_softmax(-1)
            (begin, end) = data.train.answers.of(document, own.shape[1])[0]
            losses += [-logits[0, i - 1, own[0, i]] for i in range(begin, end)]
        assert found["loss"].item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert layouts - {None}


def test_documents_that_do_not_fit_are_refused_or_skipped(configured, tmp_path, capsys):
    rows = [*PAIRS, {"prompt": "y" * 60, "completion": " z"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = configured()
    with pytest.raises(UserError, match=r"data.seq_len: given 32; 1 of \d+ documents of .* longer, the longest has 63 "
                                        "tokens; raise it to 63, or set sft.too_long=skip"):  # fmt: skip
        task_of(given).open()
    skipping = task_of(load_config(tmp_path / "config.yaml", [*_words(given), "sft.too_long=skip"]))
    train = skipping.open().train
    assert train.skipped == 1 and "sft.too_long=skip: left out 1 of" in capsys.readouterr().err
    texts = [skipping.tokenizer.decode(train.sample(position)[0].tolist()) for position in range(len(train))]
    assert not any("yyy" in text for text in texts)
    task_of(load_config(tmp_path / "config.yaml", [*_words(given), "data.seq_len=63", "train.batch_tokens=63"])).open()


def _words(config):
    """Settings of test configs as words."""
    data, model = config.data, config.model
    source = f"[{{kind: files, path: {data.sources[0].path}, format: prompt-completion}}]"
    return ["task=sft", f"data.dir={data.dir}", f"data.sources={source}", f"data.seq_len={data.seq_len}",
            f"data.validation_fraction={data.validation_fraction}", f"data.tokenizer.path={data.tokenizer.path}",
            f"model.vocab_size={model.vocab_size}", "train.batch_tokens=64", "train.micro_batch=1"]  # fmt: skip


def test_it_trains_resumes_and_is_evaluated(configured, tmp_path):
    check_resume(configured, tmp_path)
    validation = [r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "validation"][-1]
    assert {"validation_loss", "validation_accuracy", "validation_whole"} <= validation.keys()
    assert cli.run(["evaluate", str(tmp_path / "whole")]) == 0
    with pytest.raises(UserError, match="sft.too_long: given 'skip', but .* was trained with 'refuse'; put it back"):
        loop.train(configured(f"run.dir={tmp_path / 'parts'}", "sft.too_long=skip", "train.max_steps=6"))


def test_a_changed_list_of_documents_is_refused(configured, tmp_path):
    """Also if it can still be read: it says which tokens are answers."""
    task, path = task_of(configured()), tmp_path / "data/train.documents.parquet"
    table = parquet.read_table(pyarrow.BufferReader(path.read_bytes()))
    parquet.write_table(table.set_column(6, "answers", table["answers"].take([1, 0, *range(2, len(table))])), path)
    with pytest.raises(UserError, match="train.documents.parquet: .*; copy it again, or make the token files again"):
        task.open()


@pytest.mark.parametrize(("key", "message"), [
    ("answers", "data.dir: .* marks other answers than .* was trained on .data.sources."),
    ("data", "data.dir: .* holds other token files than .* was trained on"),
])  # fmt: skip
def test_what_differs_from_the_training_is_named(configured, tmp_path, key, message):
    assert re.match(message, task_of(configured()).differs(key, tmp_path, "a" * 64, "b" * 64))


def test_sources_by_weight(configured, tmp_path):
    """Each stream is packed on its own, and rows are drawn by weight."""
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"prompt": "p", "completion": f" q{i}"}) + "\n"
                                                 for i in range(40)))  # fmt: skip
    kinds = [f"{{kind: files, path: {tmp_path / name}, format: prompt-completion, weight: {weight}}}"
             for name, weight in (("pairs.jsonl", 3), ("more.jsonl", 1))]  # fmt: skip
    task = task_of(configured(f"data.sources=[{', '.join(kinds)}]", f"data.dir={tmp_path / 'mixed'}"))
    train = task.open().train
    second = ["p q" in task.tokenizer.decode(train.sample(position)[0].tolist()) for position in range(40)]
    assert second.count(True) == 10


def test_a_chat_trains_from_the_weights_of_a_language_model(configured, tmp_path):
    """The embedding is taken too: the tokenizer is the same. Documents with answers also serve task=language."""
    pytest.importorskip("transformers")
    chats = [{"messages": said(f"{i}?", "a", "b", f"{i % 7}")} for i in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    source = f"data.sources=[{{kind: files, path: {tmp_path / 'chats.jsonl'}, format: messages}}]"
    longer = ["data.seq_len=64", "train.batch_tokens=128"]
    more = [source, f"data.dir={tmp_path / 'chats'}", "train.stop_at=1", *longer]
    loop.train(configured(*more, "task=language", f"run.dir={tmp_path / 'language'}"))
    loop.train(configured(*more, f"run.dir={tmp_path / 'tuned'}", f"train.init_from={tmp_path / 'language'}"))
    assert "0 of " in (tmp_path / "tuned" / "log.txt").read_text()
    last = source.replace("messages}", "messages, answers: last}")
    again = configured(last, *longer, f"data.dir={tmp_path / 'last'}", f"run.dir={tmp_path / 'tuned'}")
    with pytest.raises(UserError, match="data.dir: .*/last marks other answers than .* was trained on .* put it back"):
        loop.train(again)


def test_tasks_with_the_same_model_take_each_others_weights(configured):
    takes = {name: set(task_of(configured(f"task={name}", prepare=False)).takes) for name in ("sft", "language")}
    assert {"language", "attention_transfer", "ruler", "babilong"} <= takes["sft"]
    assert "sft" in takes["language"] and not takes["sft"] & {"needles", "recall", "forecast", "classify_dna"}


def test_samples_are_inspected_with_their_answers(configured, tmp_path, capsys):
    given = configured()
    assert cli.run(["data", "inspect", str(tmp_path / "config.yaml"), *_words(given), "--sample", "0"]) == 0
    out = capsys.readouterr().out
    assert "sample 0: epoch 0" in out and "; trained: ' " in out
