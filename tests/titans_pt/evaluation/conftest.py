"""A run made of stand-ins, and texts for it."""

import re
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.stand_ins import EOS, ESSAY, Characters, Scripted
from titans_pt.config.files import load_config
from titans_pt.data_pipeline.indexed import IndexedDataset, IndexedWriter
from titans_pt.data_pipeline.tokenizers import train_tokenizer
from titans_pt.evaluation import babilong, generation, perplexity, ruler, runner
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import LoadedRun
from titans_pt.tasks import ruler_words
from titans_pt.tasks.language import Language


@pytest.fixture
def essays(tmp_path, monkeypatch):
    """A folder with one essay; a simple rule splits sentences, which needs no download."""
    folder = tmp_path / "essays"
    folder.mkdir()
    (folder / "garden.txt").write_text(ESSAY)

    def simple(text):
        return re.split(r"(?<=[.!?]) (?=[A-Z])", text)

    monkeypatch.setattr(ruler, "sentences", simple)
    monkeypatch.setattr(babilong, "sentences", simple)
    return folder


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory):
    """A small tokenizer of the project's own kind, trained on text like the tasks'."""
    random = Random(0)
    texts = [f"{ESSAY} {ruler_words.NEEDLE} {ruler.NOISE}\n{ruler.HEAD}\n{ruler_words.QUESTION} {ruler_words.PREFIX}"]
    texts += [ruler.draw(kind, random) for kind in ("words", "numbers", "uuids") for _ in range(200)]
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", 500, 10**6)


SETTINGS = """
model: {vocab_size: 128, window: 32, segment: 32, memory_tokens: 8}
data: {seq_len: 64}
train: {batch_tokens: 64}
evaluation:
  prefill_tokens: 100
  perplexity: {tokens: 200}
  needle: {lengths: [700, 900], depths: [0, 50, 100], samples: 2, max_new_tokens: 10}
"""


class StandIn(SimpleNamespace):
    """A LoadedRun that tests may change."""

    identity, read_last, caching = LoadedRun.identity, LoadedRun.read_last, None


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of the copying model and ASCII validation text; runner and generation load it for any path."""
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    with IndexedWriter(tmp_path / "validation", 128) as writer:
        for length in (90, 160, 70):
            writer.add([*np.random.default_rng(length).integers(97, 123, length - 1), EOS])
    manifest = {"unigram_loss": 3.3, "tokenizer_sha256": Characters.sha256}
    validation = IndexedDataset(tmp_path / "validation")
    files = SimpleNamespace(validation=validation, manifest=manifest, tokenizer=Characters())
    text = perplexity.TokenFiles.of_another_text
    monkeypatch.setattr(
        perplexity, "TokenFiles", SimpleNamespace(open=lambda config, remedy="": files, of_another_text=text)
    )
    loaded = StandIn(
        folder=folder, results=folder, config=load_config(folder.config), model=Scripted(lambda text: "a"),
        tokenizer=Characters(), step=7, checkpoint_hash="c0ffee", precision="fp32",
        task=Language(load_config(folder.config)),
    )  # fmt: skip

    def load_run(path, step=None, device="cpu", overrides=(), content=True):
        loaded.config = load_config(folder.config, overrides)
        return loaded

    for module in (runner, generation):
        monkeypatch.setattr(module, "load_run", load_run)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runner, "best_device", lambda local_rank=0: "cpu")
    return loaded
