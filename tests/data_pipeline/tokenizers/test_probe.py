"""Losses of a lossy tokenizer, by the probed kinds of text and by the documents that change."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from tests.data_pipeline.small_corpus import VOCAB
from tests.data_pipeline.tokenizers.test_huggingface import byte_level, llama, saved  # noqa: F401
from titans_pt.data_pipeline import load_tokenizer
from titans_pt.data_pipeline.inspection import inspect_data
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.data_pipeline.tokenizers import lost_kinds
from titans_pt.data_pipeline.tokenizers.probe import KINDS
from titans_pt.errors import UserError

CODE = "def f(a):\n    return a + 1\n"


@pytest.fixture(scope="module")
def defaults(tmp_path_factory, texts):
    """A SentencePiece model trained with its library's defaults."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts, CODE]), model_writer=model, vocab_size=VOCAB, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("defaults") / "defaults.model"
    path.write_bytes(model.getvalue())
    return load_tokenizer(path)


def test_a_sentencepiece_model_of_the_librarys_defaults(defaults):
    lost = lost_kinds(defaults)
    assert {"line breaks", "tabs", "spaces at the start", "spaces at the end", "runs of spaces", "CJK", "emoji",
            "compatibility forms", "control characters"} <= set(lost)  # fmt: skip
    assert not defaults.gives_back(CODE) and defaults.gives_back("the memory")


def test_those_that_lose_nothing(tokenizer, byte_level, llama):  # noqa: F811
    for lossless in (tokenizer, load_tokenizer(byte_level), load_tokenizer(llama)):
        assert lost_kinds(lossless) == []


CHANGES = {
    "capital letters": {"normalizer": normalizers.Lowercase()},
    "accents": {"normalizer": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])},
    "compatibility forms": {"normalizer": normalizers.NFKC()},
    "combining accents": {"normalizer": normalizers.NFC()},
    "spaces at the end": {"normalizer": normalizers.Strip()},
    "tabs": {"normalizer": normalizers.Replace("\t", "    ")},
    "digits": {"normalizer": normalizers.Replace(tokenizers.Regex("[0-9]+"), "0")},
    "control characters": {"normalizer": normalizers.Replace(tokenizers.Regex("[\\x00-\\x08]"), "")},
    "CJK": {"normalizer": normalizers.Replace(tokenizers.Regex("[\\u4e00-\\u9fff]"), "?")},
    "emoji": {"normalizer": normalizers.Replace(tokenizers.Regex("[\U0001f300-\U0001faff]"), "")},
    "spaces at the start": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "runs of spaces": {"pre_tokenizer": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=True)])},
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_tokenizer_json_loses(byte_level, tmp_path, kind):  # noqa: F811
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_level))
    for name, value in CHANGES[kind].items():
        setattr(tokenizer, name, value)
    lost = lost_kinds(load_tokenizer(saved(tmp_path / "a", tokenizer)))
    assert kind in lost and len(lost) < len(KINDS)


def test_a_model_without_bytes(texts, tmp_path, byte_level):  # noqa: F811
    tree = json.loads(tokenizers.Tokenizer.from_file(str(byte_level)).to_str())
    tree["model"]["vocab"].pop("\u0120")  # byte-level's space
    tree["model"]["merges"] = [merge for merge in tree["model"]["merges"] if "\u0120" not in "".join(merge)]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tree))
    tokenizer.decoder = decoders.ByteLevel()
    assert "runs of spaces" in lost_kinds(load_tokenizer(saved(tmp_path / "a", tokenizer)))


def test_prepare_counts_the_documents_that_change_and_says_what_is_lost(defaults, config, tmp_path, capsys):
    corpus = tmp_path / "code.jsonl"
    lines = [f"the memory {'of a model ' * i}" + "\n    and more" * (i % 3 == 0) for i in range(60)]
    lines = [line.rstrip() for line in lines]
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = {"tokenizer": {"path": str(defaults.path)}, "sources": [{"kind": "files", "path": str(corpus)}]}
    model = {"vocab_size": defaults.vocab_size}
    manifest = prepare(config(data=data, model=model))
    assert manifest["round_trip"] == {"tried": 60, "equal": 40}
    shown = capsys.readouterr().err
    assert "the tokenizer is lossy: 20 of 60 documents do not come back" in shown and "line breaks" in shown
    inspect_data(config(data=data, model=model))
    assert "40 of 60 documents tried" in (shown := capsys.readouterr().out) and "loses line breaks" in shown
    strict = config(data=data | {"tokenizer": {"path": str(defaults.path), "lossy": "refuse"}}, model=model)
    with pytest.raises(UserError, match="lossy: given 'refuse', but the tokenizer is lossy: 20 of 60.*=warn"):
        prepare(strict)  # all is prepared already, but it still refuses
    with pytest.raises(UserError, match="lossy: given 'refuse', but .*defaults.model loses line breaks,.*=warn"):
        prepare(strict, force=True)
    assert prepare(config(data=data, model=model)) == manifest


def test_a_document_that_changes_is_refused_by_its_place(llama, config, tmp_path):  # noqa: F811
    """The tokenizer passes all probes, but the text has the one character that it confuses with another."""
    corpus = tmp_path / "text.jsonl"
    lines = [f"text {i}" for i in range(30)] + ["here is a \u2581 sign"]
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    size = load_tokenizer(llama).vocab_size

    def settings(lossy):
        data = {"tokenizer": {"path": str(llama), "lossy": lossy}, "sources": [{"kind": "files", "path": str(corpus)}]}
        return config(data=data, model={"vocab_size": size})

    told = r"the document at .*text.jsonl row \d+ does not come back.* sign' becomes .* at character 10.*lossy=warn"
    with pytest.raises(UserError, match=told):
        prepare(settings("refuse"))
    assert prepare(settings("warn"))["round_trip"] == {"tried": 31, "equal": 30}
