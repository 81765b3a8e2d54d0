"""Supervised fine-tuning (SFT): documents that hold answers, of which the answers alone are trained.

``titans prepare`` marks the answers of sources with format=prompt-completion or messages in its token files.
"""

import sys
from pathlib import Path
from typing import Literal

import numpy as np

from titans_pt.config import Config, Section
from titans_pt.data_pipeline import IndexedDataset, Mixture, TokenFiles
from titans_pt.data_pipeline.answers import Answers, best_fit
from titans_pt.data_pipeline.manifest import damage, refuse_damage
from titans_pt.errors import UserError
from titans_pt.models.mixers.base import Need
from titans_pt.tasks.answers import AnswersOnly, WholeAnswers
from titans_pt.tasks.base import TASKS, TaskData
from titans_pt.tasks.language import Language
from titans_pt.tasks.places import Places
from titans_pt.tools.processes import place
from titans_pt.tools.records import digest


class PackedDocuments:
    """Rows of ``seq_len`` tokens that hold whole documents, in an order that is a function of (seed, position).

    Which documents share a row is decided once, by best-fit decreasing: each document, longest first, goes to the
    fullest row that has room for it. Every epoch reads all rows once.

    Args:
        stream, answers: the documents, and where their answers are.
        too_long: "refuse" or "skip" documents of more than ``seq_len`` tokens.

    Raises:
        UserError: a document is too long, or none is left.
    """

    def __init__(self, stream: IndexedDataset, answers: Answers, seq_len: int, seed: int, too_long: str = "refuse"):
        self.dataset, self.answers, self.seq_len = stream, answers, seq_len
        self._lengths = lengths = np.concatenate([*stream.lengths()]).astype(np.int64)  # a sequence is a document
        self._starts = lengths.cumsum() - lengths
        fits = np.flatnonzero(lengths <= seq_len)
        self.skipped = len(lengths) - len(fits)
        if self.skipped and (too_long == "refuse" or not len(fits)):
            raise UserError(
                f"data.seq_len: given {seq_len}; {self.skipped:,} of {len(lengths):,} documents of {stream.prefix} are "
                f"longer, the longest has {lengths.max():,} tokens; raise it to {lengths.max()}"
                + (", or set sft.too_long=skip" if len(fits) else "")
            )
        if self.skipped and place().rank == 0:
            print(f"sft.too_long=skip: left out {self.skipped:,} of {len(lengths):,} documents of {stream.prefix}, "
                  f"which have more than data.seq_len={seq_len} tokens", file=sys.stderr)  # fmt: skip
        self._rows = [fits[row] for row in best_fit(lengths[fits], seq_len)]
        self._places = Places(len(self._rows), seed)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, position: int) -> np.ndarray:
        """Numbers of the documents in the row at ``position``, which counts over all epochs."""
        return self._rows[self._places[position]]

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids (T + 1,) int64; reset (T,) bool, True where a document starts; asked (T,) bool, True before a token of an
        answer. The rest of a row is token 0."""
        ids = np.zeros(self.seq_len + 1, np.int64)
        reset, asked = np.zeros((2, self.seq_len), bool)
        at = 0
        for document in self.row(position):
            length = int(self._lengths[document])
            start = int(self._starts[document])
            ids[at : at + length] = self.dataset.read(start, start + length)
            reset[at] = True
            for begin, end in self.answers.of(document, length):
                asked[at + max(begin, 1) - 1 : at + end - 1] = True  # nothing precedes a document's first token
            at += length
        if at < self.seq_len:
            reset[at] = True
        return ids, reset, asked

    def describe(self, position: int) -> dict:
        """Origin of the row at ``position``: its documents' numbers in the stream."""
        return {
            "position": position,
            "epoch": position // len(self._rows),
            "documents": self.row(position).tolist(),
            "file": f"{self.dataset.prefix}.bin",
        }


class DocumentAnswers(WholeAnswers):
    """:class:`WholeAnswers` of rows whose documents differ in length."""

    of_one_length = False


@TASKS.register
class SupervisedFineTuning(AnswersOnly, Language):
    """The answer to a prompt, or the assistant's messages in a chat."""

    name = "sft"

    class Settings(Section):
        too_long: Literal["refuse", "skip"] = "refuse"
        """Treatment of documents of more than data.seq_len tokens, which fit into no row. skip: leave them out, and
        say how many."""

    settings: Settings
    unit = "nats per token of the answers"
    usual = ("perplexity",)
    figures = ("loss", "accuracy", "whole")
    answer_loss = DocumentAnswers

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        kind = config.data.tokenizer.kind
        need(kind != "nucleotides", "data.tokenizer.kind", kind, "not with task=sft")

    def open(self) -> TaskData:
        """
        Raises:
            UserError: as TokenFiles.open, :class:`Answers` and :class:`PackedDocuments`; a damaged list of documents.
        """
        files = TokenFiles.open(self.config)
        self.tokenizer = files.tokenizer
        data, seed = self.config.data, self.config.run.seed
        streams = [*files.train, files.validation]
        lists = [stream.list_of_documents.name for stream in streams]
        refuse_damage(Path(data.dir), damage(Path(data.dir), files.manifest, lists))
        every = [Answers(stream) for stream in streams]
        *train, validation = [
            PackedDocuments(stream, answers, data.seq_len, seed if stream is not files.validation else 0,
                            self.settings.too_long)
            for stream, answers in zip(streams, every, strict=True)
        ]  # fmt: skip
        mixture = Mixture(train, data.weights) if len(train) > 1 else None
        return TaskData(
            mixture or train[0], validation,
            {"tokenizer": files.tokenizer.sha256, "data": files.fingerprint,
             "answers": digest(*(answers.sha256 for answers in every), self.settings.too_long)},
            sources=self._sources(mixture) if mixture else {},
        )  # fmt: skip

    def differs(self, key: str, path: Path, was: str, now: str) -> str:
        if key == "answers":
            return f"data.dir: {self.config.data.dir} marks other answers than {path} was trained on (data.sources)"
        return super().differs(key, path, was, now)
