"""Stand-ins: tokenizers and models that are small enough to reason about, and a run made of them."""

import re
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from titans_pt.config_file import load_config
from titans_pt.data_pipeline.indexed import IndexedDataset, IndexedWriter
from titans_pt.data_pipeline.tokenizer import train_tokenizer
from titans_pt.evaluation import babilong, needle, perplexity, runner, stream
from titans_pt.run import LoadedRun
from titans_pt.tasks.language import Language

EOS = 0


ESSAY = (
    "The first thing to say of a garden is that nobody owns it. Mr. Green thought so too, and wrote it down! "
    "Is that true? In 1993 there were 3.5 gardens for each of us, or so they say; now there are none.  Nobody\n"
    "minds.\n\nWhat one plants in April (if it rains) stands in June. That is all one has to know about it."
)


class Characters:
    """A token a character (ASCII); eos is 0."""

    vocab_size, bos_id, eos_id, sha256 = 128, -1, EOS, "characters"
    pieces, dummy_prefix = [b"", *(bytes([i]) for i in range(1, 128))], False  # what StreamDecoder goes by

    def encode(self, text):
        return list(text.encode("ascii"))

    def decode(self, ids):
        return bytes(i for i in ids if i != EOS).decode("ascii")


class OverLines(Characters):
    """Merges a full stop and the newline behind it into token 1: lines cannot be tokenised apart."""

    sha256 = "over-lines"

    def encode(self, text):
        return super().encode(text.replace(".\n", "\x01"))

    def decode(self, ids):
        return super().decode(ids).replace("\x01", ".\n")


@dataclass
class History:
    ids: torch.Tensor


class Scripted(nn.Module):
    """Next tokens as ``answer(text so far) -> character`` says; its state is the whole text."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.reads = answer, 0

    def forward(self, ids, state=None, reset=None, last_only=False):
        self.reads += ids.shape[1]
        past = ids if state is None else torch.cat([state.ids, ids], dim=1)
        first = past.shape[1] if last_only else past.shape[1] - ids.shape[1] + 1
        logits = torch.full((1, past.shape[1] - first + 1, 128), -20.0)
        for row, end in enumerate(range(first, past.shape[1] + 1)):
            logits[0, row, ord(self.answer(Characters().decode(past[0, :end].tolist())))] = 20.0
        return logits, History(past)


def copies(text):
    """Knows the value from the needle and says it after the answer prefix, then ends."""
    value, (_, asked, so_far) = re.search(r"is: (\d{7})\.", text), text.rpartition("provided text is")
    return (f" {value[1]}" + chr(EOS))[len(so_far)] if value and asked else "?"


class Recurrent(nn.Module):
    """A GRU language model with the call of titans_pt's."""

    def __init__(self, vocab_size=128, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids, state=None, reset=None, last_only=False):
        y, h = self.cell(self.embedding(ids), None if state is None else state.ids)
        return self.head(y[:, -1:] if last_only else y), History(h)


@pytest.fixture
def essays(tmp_path, monkeypatch):
    """A folder with one essay; sentences end where a simple rule says, so that nothing has to be fetched."""
    folder = tmp_path / "essays"
    folder.mkdir()
    (folder / "garden.txt").write_text(ESSAY)

    def simple(text):
        return re.split(r"(?<=[.!?]) (?=[A-Z])", text)

    monkeypatch.setattr(needle, "sentences", simple)
    monkeypatch.setattr(babilong, "sentences", simple)
    return folder


@pytest.fixture
def recurrent():
    torch.manual_seed(0)
    return Recurrent().eval()


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory):
    """The project's own tokenizer, small, trained on text like that of the tasks."""
    random = Random(0)
    texts = [f"{ESSAY} {needle.NEEDLE} {needle.NOISE}\n{needle.HEAD}\n{needle.QUESTION} {needle.PREFIX}"]
    texts += [needle.draw(kind, random) for kind in ("words", "numbers", "uuids") for _ in range(200)]
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

    identity = LoadedRun.identity


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of the copying model and ASCII validation text; runner and stream load it for any path."""
    folder = SimpleNamespace(
        path=tmp_path, config=tmp_path / "config.yaml", evaluation=tmp_path / "evaluation", plots=tmp_path / "plots"
    )
    folder.config.write_text(SETTINGS)
    with IndexedWriter(tmp_path / "validation", 128) as writer:
        for length in (90, 160, 70):
            writer.add([*np.random.default_rng(length).integers(97, 123, length - 1), EOS])
    manifest = {"unigram_loss": 3.3, "tokenizer_sha256": Characters.sha256}
    files = SimpleNamespace(validation=IndexedDataset(tmp_path / "validation"), manifest=manifest)
    monkeypatch.setattr(perplexity, "TokenFiles", SimpleNamespace(open=lambda config: files))
    loaded = StandIn(
        folder=folder, config=load_config(folder.config), model=Scripted(lambda text: "a"), tokenizer=Characters(),
        step=7, checkpoint_hash="c0ffee", precision="fp32", task=Language(load_config(folder.config)),
    )  # fmt: skip

    def load_run(path, step=None, device="cpu", overrides=()):
        loaded.config = load_config(folder.config, overrides)
        return loaded

    for module in (runner, stream):
        monkeypatch.setattr(module, "load_run", load_run)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runner, "best_device", lambda local_rank=0: "cpu")
    return loaded
