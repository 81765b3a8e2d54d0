"""Tokenizers and models that are small enough to reason about."""

import re
from dataclasses import dataclass

import torch
from torch import nn

EOS = 0


ESSAY = (
    "The first thing to say of a garden is that nobody owns it. Mr. Green thought so too, and wrote it down! "
    "Is that true? In 1993 there were 3.5 gardens for each of us, or so they say; now there are none.  Nobody\n"
    "minds.\n\nWhat one plants in April (if it rains) stands in June. That is all one has to know about it."
)


class Characters:
    """A tokenizer with one token per character; eos is 0. Characters that are not ASCII become question marks."""

    vocab_size, bos_id, eos_id, begin, sha256 = 128, -1, EOS, (), "characters"
    pieces, dummy_prefix = [b"", *(bytes([i]) for i in range(1, 128))], False  # read by StreamDecoder
    names = [chr(i) for i in range(128)]

    def encode(self, text):
        return list(text.encode("ascii", errors="replace"))

    def document(self, text):
        return [*self.begin, *self.encode(text)]

    @property
    def before_text(self):
        return list(self.begin) or [EOS]

    def decode(self, ids):
        return bytes(i for i in ids if i != EOS).decode("ascii")


class OverLines(Characters):
    """A tokenizer that merges a full stop and the next newline into token 1: lines cannot be tokenised separately."""

    sha256 = "over-lines"

    def encode(self, text):
        return super().encode(text.replace(".\n", "\x01"))

    def decode(self, ids):
        return super().decode(ids).replace("\x01", ".\n")


@dataclass
class History:
    ids: torch.Tensor


class Scripted(nn.Module):
    """A model that predicts ``answer(text so far) -> character``; its state is the whole text."""

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
    """Answer the needle's value after the answer prefix, then end."""
    value, (_, asked, so_far) = re.search(r"is: (\d{7})\.", text), text.rpartition("provided text is")
    return (f" {value[1]}" + chr(EOS))[len(so_far)] if value and asked else "?"


class Recurrent(nn.Module):
    """A GRU language model with the call signature of titans_pt's models."""

    def __init__(self, vocab_size=128, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids, state=None, reset=None, last_only=False):
        y, h = self.cell(self.embedding(ids), None if state is None else state.ids)
        return self.head(y[:, -1:] if last_only else y), History(h)
