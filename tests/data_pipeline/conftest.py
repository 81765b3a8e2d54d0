"""The small corpus, the tokenizer trained on it, and configs that point at temporary folders."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.data_pipeline.small_corpus import VOCAB, make_texts, write_jsonl
from titans_pt.config import Config
from titans_pt.data_pipeline.tokenizers import train_tokenizer


@pytest.fixture(scope="session")
def texts():
    return make_texts(200)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory, texts):
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer") / "small.model", VOCAB, 10**6)


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(): from now on a copy of a file is cut short, and fails."""

    def full(_, target):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(shutil, "copyfile", full)


@pytest.fixture
def corpus(tmp_path, texts):
    return write_jsonl(tmp_path / "corpus.jsonl", texts)


@pytest.fixture
def config(tmp_path, corpus):
    """config(data={...}, model={...}): the corpus into tmp_path/data, with changes."""

    def build(data=None, model=None):
        return Config.model_validate(
            {
                "data": {
                    "dir": str(tmp_path / "data"),
                    "sources": [{"kind": "files", "path": str(corpus)}],
                    "validation_fraction": 0.2,
                    "seq_len": 64,
                    **(data or {}),
                },
                "model": {"vocab_size": VOCAB, "window": 16, "segment": 16, "memory_tokens": 16, **(model or {})},
                "train": {"batch_tokens": 64 * 8},
            }
        )

    return build
