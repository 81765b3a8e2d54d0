"""Perplexity on the validation tokens, whole and by the position in the stream."""

import contextlib
import hashlib
import itertools
import logging
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.data_pipeline import IndexedDataset, TokenFiles, document_begins
from titans_pt.errors import UserError
from titans_pt.evaluation.plots import plot_positions
from titans_pt.layers.memory_gates import Gates
from titans_pt.models.mixers.common import any_memory
from titans_pt.runs.loaded import LoadedRun
from titans_pt.streaming import device_of
from titans_pt.tools.records import digest
from titans_pt.tools.statistics import doubling, perplexity, ratio_error

log = logging.getLogger(__name__)

LOSS_ROWS = 512
"""Tokens whose losses are computed at a time: a second (T, V) array would double the memory."""


@contextlib.contextmanager
def frozen_memory(model: nn.Module):
    """Within the block, the memory is read but not written: M stays as it is, and its momentum is zero."""
    gates = [module for module in model.modules() if isinstance(module, Gates)]
    before = [gate.writes for gate in gates]
    try:
        for gate in gates:
            gate.writes = False
        yield
    finally:
        for gate, writes in zip(gates, before, strict=True):
            gate.writes = writes


@torch.no_grad()
def token_losses(
    model: nn.Module, ids: Tensor, chunk_tokens: int, reset: Tensor | None = None, freeze_after: int | None = None
) -> Tensor:
    """Negative log-likelihood (nats) of every token of a stream after its first, as a float64 CPU tensor (T - 1,).

    Args:
        ids: (T,) integers, T >= 2; the model starts without a state at the first.
        chunk_tokens: tokens of a piece; the state is carried from piece to piece.
        reset: (T,) bool, True where a document begins and the model must forget; None: nowhere.
        freeze_after: from this token on the memory is read and not written; None: it is always written.
    """
    device = device_of(model)
    ids = ids.to(torch.int64)
    end = len(ids) - 1
    freeze = end if freeze_after is None else min(freeze_after, end)
    losses, state = [], None
    for start, stop in (*_pieces(0, freeze, chunk_tokens), *_pieces(freeze, end, chunk_tokens)):
        cut = None if reset is None else reset[None, start:stop]
        with frozen_memory(model) if start >= freeze else contextlib.nullcontext():
            logits, state = model(ids[None, start:stop].to(device), state, cut)
        targets = ids[start + 1 : stop + 1].to(device)
        for rows, wanted in zip(logits[0].split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True):
            losses.append(F.cross_entropy(rows.float(), wanted, reduction="none").double().cpu())
    return torch.cat(losses)


def _pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


def resets(tokens: IndexedDataset, start: int, count: int, config: Config) -> Tensor | None:
    """(count,) bool for the tokens from ``start`` on: True where a document begins, at which the model must forget;
    None without data.reset_at_documents."""
    if not config.data.reset_at_documents:
        return None
    return torch.from_numpy(document_begins(tokens.document_starts, start, count))


def position_sums(losses: np.ndarray) -> list[list[float]]:
    """[n, sum, sum of squares] of the losses in each bucket of positions: 1, 2, 3 to 4, 5 to 8, 9 to 16 ...

    The position of a token is the number of tokens before it in its stream: losses[i] is at i + 1.
    """
    parts = (losses[bucket] for bucket in doubling(len(losses)))
    return [[len(part), math.fsum(part), math.fsum(part**2)] for part in parts]


class Perplexity:
    """One record a stream of ``length`` tokens; sums are float64, so that they add up in any order.

    A stream of L scored tokens reads L + 1: its first token is context only, and the stream before scores it. The
    last stream may be shorter.

    Raises:
        UserError: no validation text to score, no token files, or token files of another tokenizer.
    """

    name = "perplexity"

    def __init__(self, run: LoadedRun, config: Config):
        self.loaded, self.config = run, config
        setting, folder, remedy = "data.dir", config.data.dir, f"the settings in {run.folder.config}"
        if (text := config.evaluation.perplexity.text) is not None:
            setting, folder = "evaluation.perplexity.text", text
            remedy = (f"titans prepare {run.folder.config} data.dir={text} data.tokenizer.path={run.folder.tokenizer} "
                      "'data.sources=[...]'")  # fmt: skip
            files = TokenFiles.of_another_text(config, Path(text))
            if files is None:
                raise UserError(f"{setting}: {folder} holds no token files; make them with: {remedy}")
        else:
            another = f"evaluation.perplexity.text={folder} scores their validation tokens nevertheless"
            files = TokenFiles.open(config, remedy=another)
        made = files.manifest["tokenizer_sha256"], files.tokenizer.eos_id  # a tokenizer.json does not name its eos
        if made != (run.tokenizer.sha256, run.tokenizer.eos_id):
            raise UserError(
                f"{setting}: {folder} holds token files of another tokenizer, or another eos, than the run's; "
                f"prepare them again with {remedy}"
            )
        bos = bool(files.manifest.get("settings", {}).get("data.tokenizer", {}).get("add_bos"))
        if bos != bool(run.tokenizer.begin):
            log.warning("%s: documents in %s begin %s bos, those of the run's training %s it; for a fair loss set "
                        "data.tokenizer.add_bos=%s and prepare them again", setting, folder,
                        *(("with", "without") if bos else ("without", "with")), str(not bos).lower())  # fmt: skip
        self.unigram_loss = files.manifest["unigram_loss"]
        self.validation = files.validation
        self.length = config.evaluation.perplexity.length or config.data.seq_len
        self.tokens = min(config.evaluation.perplexity.tokens, self.validation.tokens - 1)
        if self.tokens < 1:
            raise UserError(
                f"{setting}: {folder} holds {self.validation.tokens} validation tokens, at least 2 are "
                "needed; raise data.validation_fraction or add text, and prepare again"
            )
        self.sizes = np.array([len(piece) for piece in run.tokenizer.pieces])
        # None: the memory is always written.
        after = sorted(set(config.evaluation.perplexity.freeze_after))
        gates = any(isinstance(module, Gates) for module in run.model.modules())
        if after and not (gates or any_memory(run.config.model.kinds)):
            log.warning("evaluation.perplexity.freeze_after=%s has no effect: no mixer of this model (%s) has a memory "
                        "that can be frozen", after, ", ".join(run.config.model.kinds))  # fmt: skip
            after = []
        self.variants = [None, *after]
        self.jobs = [(start, freeze) for freeze in self.variants for start in range(0, self.tokens, self.length)]
        self.keys = [self._key(*job) for job in self.jobs]

    def _stop(self, start: int) -> int:
        return min(start + self.length, self.tokens)

    def _read(self, start: int) -> np.ndarray:
        return self.validation.read(start, self._stop(start) + 1).astype(np.int64)

    def _bytes(self, start: int) -> int:
        """Bytes of the text in the scored tokens of a stream, which may begin and end within a character."""
        ids, tokenizer = self._read(start), self.loaded.tokenizer
        total = int(self.sizes[ids[1:]].sum())
        if tokenizer.dummy_prefix:  # the space before each document is not part of it
            begins = np.flatnonzero(document_begins(self.validation.document_starts, start, len(ids)))
            for begin, end in itertools.pairwise([*begins, len(ids)]):
                first = next((i for i in range(begin, end) if tokenizer.pieces[ids[i]]), 0)
                total -= first > 0 and tokenizer.pieces[ids[first]].startswith(b" ")
        return total

    def _key(self, start: int, freeze_after: int | None) -> str:
        # The ids themselves are part of the key: new token files in the same folder are another measurement.
        text = hashlib.sha256(self._read(start).tobytes()).hexdigest()
        run = self.loaded
        frozen = () if freeze_after is None else (freeze_after,)
        return digest(self.name, start, self._stop(start), text, run.tokenizer.sha256, run.identity, *frozen)

    def measure(self, index: int) -> dict:
        """Scores stream ``index``: n, nats, the text's bytes and the sums by position."""
        (start, freeze), run = self.jobs[index], self.loaded
        ids = self._read(start)
        reset = resets(self.validation, start, len(ids), self.config)
        began = time.perf_counter()
        chunk_tokens = self.config.evaluation.prefill_tokens
        losses = token_losses(run.model, torch.from_numpy(ids), chunk_tokens, reset, freeze).numpy()
        seconds = time.perf_counter() - began
        return {
            "start": start,
            "freeze_after": freeze,
            "n": len(losses),
            "nats": math.fsum(losses),
            "bytes": self._bytes(start),
            "positions": position_sums(losses),
            "tokens_per_s": len(losses) / seconds,
        }

    def summary(self, records: list[dict]) -> dict:
        """loss (nats per token), its stderr, perplexity, bits per byte, the unigram baseline's loss, loss by position,
        and ``by_stream``, the loss of each stream. With it two runs can be compared on the same text, more precisely
        than by their losses.

        ``frozen`` has the same figures with the memory frozen after each number of tokens. The stderr of the loss
        assumes independent streams (null with a single stream). The stderr of a position assumes independent tokens in
        a bucket; neighbours in a text are dependent, and it is a lower bound.
        """
        live, *frozen = ([r for r in records if r["freeze_after"] == freeze] for freeze in self.variants)
        return self._figures(live) | {
            "text": self.config.evaluation.perplexity.text,
            "frozen": [{"after": part[0]["freeze_after"], **self._figures(part)} for part in frozen],
        }

    def _figures(self, records: list[dict]) -> dict:
        n = sum(record["n"] for record in records)
        nats = math.fsum(record["nats"] for record in records)
        by_stream = [record["nats"] / record["n"] for record in records]
        # Not from the records: earlier versions counted a character that two streams share as U+FFFD in each.
        size = sum(self._bytes(record["start"]) for record in records)
        loss = nats / n
        positions = []
        for bucket in range(max(len(record["positions"]) for record in records)):
            parts = [record["positions"][bucket] for record in records if bucket < len(record["positions"])]
            count, total, squares = (math.fsum(column) for column in zip(*parts, strict=True))
            mean = total / count
            stderr = math.sqrt(max(0.0, squares / count - mean**2) / (count - 1)) if count > 1 else None
            first, last = 2**bucket // 2 + 1, min(2**bucket, self.length, self.tokens)
            positions.append({"first": first, "last": last, "mean": mean, "n": int(count), "stderr": stderr})
        by_length, tokens, total = [], 0, 0.0
        for row in positions:
            tokens, total = tokens + row["n"], total + row["n"] * row["mean"]
            by_length.append({"length": row["last"], "loss": total / tokens, "perplexity": perplexity(total / tokens)})
        return {
            "loss": loss,
            "stderr": ratio_error([record["n"] for record in records], by_stream),
            "perplexity": perplexity(loss),
            "bits_per_byte": nats / math.log(2) / size if size else None,
            "unigram_loss": self.unigram_loss,
            "tokens": n,
            "bytes": size,
            "length": self.length,
            "streams": len(records),
            "by_stream": by_stream,
            "tokens_per_s": n / sum(record["n"] / record["tokens_per_s"] for record in records),
            "positions": positions,
            "by_length": by_length,
        }

    def table(self, summary: dict) -> str:
        bits = "-" if summary["bits_per_byte"] is None else f"{summary['bits_per_byte']:.4f}"
        streams = f"{summary['streams']} streams of {summary['length']}"
        lines = [
            f"perplexity ({summary['tokens']} validation tokens in {streams})",
            f"  loss {summary['loss']:.4f} nats/token   perplexity {summary['perplexity']:.2f}   bits/byte {bits}   "
            f"(unigram baseline: loss {summary['unigram_loss']:.4f})",
            f"  {'position':>15} {'loss':>8} {'stderr':>8} {'n':>8}",
        ]
        for row in summary["positions"]:
            span = f"{row['first']}-{row['last']}"
            stderr = "-" if row["stderr"] is None else f"{row['stderr']:.4f}"
            lines.append(f"  {span:>15} {row['mean']:>8.4f} {stderr:>8} {row['n']:>8}")
        if summary["frozen"]:
            frozen = (f"{row['loss']:.4f} {_frozen(row['after'])}" for row in summary["frozen"])
            lines.append(f"  memory: loss {summary['loss']:.4f} on, {', '.join(frozen)} (the same text)")
        return "\n".join(lines)

    def plots(self, summary: dict, folder: Path, title: str) -> list[Path]:
        path = folder / "perplexity_by_position.png"
        return [plot_positions(summary, path, f"Validation loss by position\n{title}")]


def _frozen(after: int) -> str:
    return f"frozen after {after:,} tokens" if after else "off"
