"""Token files to batches. The whole position in the data is one number: how many samples have been consumed."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_pipeline.indexed import IndexedDataset
from data_pipeline.prepare import changed_setting, read_manifest
from data_pipeline.tokenizer import Tokenizer
from titans_pt.config import Config
from titans_pt.errors import UserError

_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class TokenFiles:
    """What ``titans prepare`` left in data.dir.

    Attributes:
        fingerprint: hash (hex) of the tokens and the tokenizer; equal for equal content, wherever it lies.
    """

    train: IndexedDataset
    validation: IndexedDataset
    tokenizer: Tokenizer
    manifest: dict
    fingerprint: str

    @classmethod
    def open(cls, config: Config) -> "TokenFiles":
        """Maps the token files of ``config``.

        Raises:
            UserError: there are none, they were made with other settings, or a file is broken.
        """
        folder, where = Path(config.data.dir), f"data.dir={config.data.dir}"
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"{where}: no token files; run: titans prepare with the same config")
        if what := changed_setting(manifest, config):
            raise UserError(f"{where}: token files of other settings ({what}); set it back, choose another data.dir, "
                            "or run: titans prepare --force")
        tokenizer = Tokenizer.load(folder / "tokenizer.model")
        if tokenizer.sha256 != manifest["tokenizer_sha256"]:
            raise UserError(f"{tokenizer.path}: not the tokenizer that made the token files beside it; "
                            "put it back, or run: titans prepare --force")
        train, validation = (IndexedDataset(folder / split) for split in ("train", "validation"))
        return cls(train, validation, tokenizer, manifest, manifest["content"])


class PackedSamples:
    """A token stream cut into samples, in an order that is a function of (seed, position).

    Sample n of T tokens has the inputs [nT, nT + T) and the targets [nT + 1, nT + T + 1) of the stream, so each
    token of the stream but the first is a target once an epoch (a last window that is not full is dropped).

    Args:
        dataset: the stream. seq_len: T. shuffle: False gives the order of the stream.

    Raises:
        UserError: fewer than T + 1 tokens.
    """

    def __init__(self, dataset: IndexedDataset, seq_len: int, seed: int, shuffle: bool = True):
        self.dataset, self.seq_len, self.seed, self.shuffle = dataset, seq_len, seed, shuffle
        self._n = (dataset.tokens - 1) // seq_len
        self._order: tuple[int, np.ndarray] | None = None
        if self._n < 1:
            raise UserError(f"data.seq_len: given {seq_len}; {dataset.prefix} has {dataset.tokens} tokens, and one "
                            f"sample needs {seq_len + 1}: lower data.seq_len, or add text in data.sources")

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._n

    def index(self, position: int) -> int:
        """Which sample n of the stream is the one at ``position`` >= 0, counted over all epochs."""
        epoch, i = divmod(position, self._n)
        return int(self._permutation(epoch)[i]) if self.shuffle else i

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample at ``position``.

        Returns:
            ids: int64 (T + 1,), inputs ids[:-1] and targets ids[1:]. reset: bool (T,), True where the input token
            is the first of a document.
        """
        start, stop = self._range(position)
        reset = np.zeros(self.seq_len, bool)
        first, last = np.searchsorted(self.dataset.document_starts, (start, start + self.seq_len))
        reset[self.dataset.document_starts[first:last] - start] = True
        return self.dataset.read(start, stop).astype(np.int64), reset

    def describe(self, position: int) -> dict:
        """Where the sample at ``position`` comes from, for an error log.

        ``tokens`` is the range [start, stop) of the stream, ``documents`` the first and last document in it.
        """
        start, stop = self._range(position)
        documents = np.searchsorted(self.dataset.document_starts, (start, stop - 1), side="right") - 1
        return {"position": position, "epoch": position // self._n, "sample": self.index(position),
                "tokens": [start, stop], "documents": documents.tolist(), "file": f"{self.dataset.prefix}.bin"}

    def _range(self, position: int) -> tuple[int, int]:
        start = self.index(position) * self.seq_len
        return start, start + self.seq_len + 1

    def _permutation(self, epoch: int) -> np.ndarray:
        """int64 (samples,). The stream of RandomState is frozen by NumPy's policy: the same for all versions."""
        cached = self._order  # read once: the loader's thread may replace it
        if cached is None or cached[0] != epoch:
            words = [self.seed & _WORD, self.seed >> 32 & _WORD, epoch & _WORD, epoch >> 32]
            self._order = cached = (epoch, np.random.RandomState(words).permutation(self._n))
        return cached[1]


class Loader:
    """One rank's part of each global batch; the batches do not depend on how many ranks there are.

    Args:
        samples: the samples. micro_batch: B, samples a rank puts through the model at once.
        rank, world_size: of the data-parallel group. batch_samples: samples of one optimiser step, all ranks together.

    Raises:
        UserError: batch_samples does not divide into micro-batches of all ranks.
    """

    def __init__(self, samples: PackedSamples, micro_batch: int, rank: int, world_size: int, batch_samples: int):
        if batch_samples % (micro_batch * world_size):
            raise UserError(_indivisible(batch_samples, micro_batch, world_size, samples.seq_len))
        self.samples, self.micro_batch, self.rank = samples, micro_batch, rank
        self.world_size, self.batch_samples = world_size, batch_samples
        self.micro_steps = batch_samples // (micro_batch * world_size)
        self._pin = torch.cuda.is_available()
        self._pool = ThreadPoolExecutor(1, "loader")
        self._ahead: tuple[int, Future] | None = None

    def batches(self, consumed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields this rank's ``micro_steps`` parts of the global batch at positions consumed + [0, batch_samples).

        Yields:
            ids: int64 (B, T + 1). reset: bool (B, T). On the CPU, in pinned memory if there is a GPU.
        """
        ahead, self._ahead = self._ahead, None
        batch = ahead[1].result() if ahead and ahead[0] == consumed else self._load(consumed)
        following = consumed + self.batch_samples  # what training asks for next; read while it computes
        self._ahead = (following, self._pool.submit(self._load, following))
        yield from batch

    def positions(self, consumed: int, micro_step: int) -> range:
        """Positions of the B samples of this rank's ``micro_step``-th part of the batch at ``consumed``."""
        start = consumed + (micro_step * self.world_size + self.rank) * self.micro_batch
        return range(start, start + self.micro_batch)

    def _load(self, consumed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self._collate(self.positions(consumed, step)) for step in range(self.micro_steps)]

    def _collate(self, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        ids, reset = zip(*(self.samples.sample(position) for position in positions), strict=True)
        tensors = torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(reset))
        return tuple(tensor.pin_memory() for tensor in tensors) if self._pin else tensors


def _indivisible(batch_samples: int, micro_batch: int, world_size: int, seq_len: int) -> str:
    """What to change so that the batch divides: a smaller micro-batch where one does, or another batch."""
    together = micro_batch * world_size
    remedy = f"set train.batch_tokens={-(-batch_samples // together) * together * seq_len}"
    share, rest = divmod(batch_samples, world_size)
    if not rest:
        fits = max(b for b in range(1, min(micro_batch, share) + 1) if share % b == 0)
        remedy = f"set train.micro_batch={fits}, or {remedy}"
    return (f"train.batch_tokens={batch_samples * seq_len}: its {batch_samples} samples of {seq_len} tokens do not "
            f"divide into train.micro_batch={micro_batch} on each of {world_size} ranks; {remedy}")
