"""Token files to samples. The whole position in the data is one number: how many samples have been consumed."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from titans_pt.config import Config
from titans_pt.data_pipeline.indexed import REMEDY, IndexedDataset, document_begins
from titans_pt.data_pipeline.manifest import (
    changed_setting,
    damage,
    read_manifest,
    refuse_damage,
    streams,
    unreadable_format,
)
from titans_pt.data_pipeline.tokenizers import Tokenizer, load_tokenizer, saved_tokenizer
from titans_pt.errors import UserError
from titans_pt.tools.tensor_files import sha256

CHECKED = (".idx", ".crc32")
"""Files of a stream that are compared with their checksum as a whole when they are opened."""
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class TokenFiles:
    """Token files that ``titans prepare`` left in data.dir.

    Attributes:
        train: the training streams: one, or one per source if the sources have weights.
        fingerprint: hash (hex) of tokens, tokenizer and weights; equal for equal content in any folder. A run that
            continued with another fingerprint would repeat samples or leave some out.
    """

    train: tuple[IndexedDataset, ...]
    validation: IndexedDataset
    tokenizer: Tokenizer
    manifest: dict
    fingerprint: str

    @classmethod
    def open(cls, config: Config, remedy: str = "") -> "TokenFiles":
        """Maps the token files of ``config``.

        Args:
            remedy: advice about files that were made with other settings; "": the advice for training.

        Index and tokenizer are compared with the manifest's checksums here, tokens with the checksums of their pages
        whenever they are read. Files of earlier versions have fewer checksums.

        Raises:
            UserError: there are no token files, they were made with other settings, or a file is broken.
        """
        folder, where = Path(config.data.dir), f"data.dir={config.data.dir}"
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"{where}: no token files; run: titans prepare CONFIG, with the same settings")
        if what := changed_setting(manifest, config):
            remedy = remedy or "set it back, choose another data.dir, or run: titans prepare CONFIG --force"
            raise UserError(f"{where}: token files made with other settings ({what}); {remedy}")
        tokenizer, *datasets = _opened(config, folder, manifest, [*dict.fromkeys(streams(config.data)), "validation"])
        *train, validation = datasets
        fingerprint = manifest["content"]
        if len(train) > 1:
            fingerprint = hashlib.sha256(json.dumps([fingerprint, config.data.weights]).encode()).hexdigest()
        return cls(tuple(train), validation, tokenizer, manifest, fingerprint)

    @classmethod
    def of_another_text(cls, config: Config, folder: Path) -> "TokenFiles | None":
        """Maps the validation tokens of ``folder`` as :meth:`open` does, whatever text and settings they were made of.

        Returns None if there are none.

        Raises:
            UserError: a file is broken, or of a format that this version cannot read.
        """
        if (manifest := read_manifest(folder)) is None:
            return None
        if what := unreadable_format(manifest):
            raise UserError(f"{folder}: token files of another version ({what}); {REMEDY}")
        tokenizer, validation = _opened(config, folder, manifest, ["validation"])
        return cls((), validation, tokenizer, manifest, manifest["content"])

    def samples(self, config: Config) -> "PackedSamples | Mixture":
        """Training samples of data.seq_len tokens in the order of run.seed, mixed by the weights of data.sources.

        Raises:
            UserError: a stream is shorter than one sample.
        """
        self._check(config, [stream.prefix.name for stream in self.train])
        other_strand = self.tokenizer.complement if config.data.reverse_complement else None
        packed = [PackedSamples(stream, config.data.seq_len, config.run.seed, complement=other_strand)
                  for stream in self.train]  # fmt: skip
        if len(packed) == 1:
            return packed[0]
        return Mixture(packed, config.data.weights)

    def validation_samples(self, config: Config) -> "PackedSamples":
        """Validation samples of data.seq_len tokens, always in the same order.

        Raises:
            UserError: validation is shorter than one sample.
        """
        self._check(config, ["validation"])
        return PackedSamples(self.validation, config.data.seq_len, 0)

    def shortages(self, config: Config) -> list[str]:
        """Messages, with remedies, about each stream that is shorter than one sample."""
        return list(self._shortages(config).values())

    def _check(self, config: Config, names: list[str]) -> None:
        found = self._shortages(config)
        for name in names:
            if name in found:
                raise UserError(found[name])

    def _shortages(self, config: Config) -> dict[str, str]:
        data, found = config.data, {}
        total = sum(stream.tokens for stream in (*self.train, self.validation))
        for stream in (*self.train, self.validation):
            if stream.tokens > data.seq_len:
                continue
            name, where, raise_ = stream.prefix.name, "data.sources", ""
            if name == "validation" and data.validation_sources:
                where = "data.validation_sources"
            elif name == "validation" and (fraction := ceil(200 * (data.seq_len + 1) / total) / 100) < 0.5:
                fraction = max(fraction, data.validation_fraction + 0.01)
                raise_ = (
                    f"raise data.validation_fraction from {data.validation_fraction} to {fraction:.2f} or more "
                    "and run: titans prepare CONFIG --force; or "
                )
            found[name] = (
                f"data.seq_len: given {data.seq_len}; {stream.prefix} has {stream.tokens} tokens, and one "
                f"sample needs {data.seq_len + 1}: {raise_}lower data.seq_len, or add text in {where}"
            )
        return found


def _opened(config: Config, folder: Path, manifest: dict, names: list[str]) -> tuple[Tokenizer, *tuple[Any, ...]]:
    """The tokenizer of token files, and an IndexedDataset of each stream."""
    path = saved_tokenizer(folder)
    at_once = [path.name, "tokenizer_config.json", *(f"{name}{suffix}" for name in names for suffix in CHECKED)]
    refuse_damage(folder, damage(folder, manifest, at_once))
    if not path.is_file() or sha256(path) != manifest["tokenizer_sha256"]:  # a damaged tokenizer can end the process
        raise UserError(
            f"{path}: not the tokenizer that made the token files next to it; "
            "put it back, or run: titans prepare CONFIG --force"
        )
    tokenizer = load_tokenizer(path, config.data.tokenizer.eos_token, config.data.tokenizer.add_bos)
    return tokenizer, *(
        IndexedDataset(folder / name, tokenizer.vocab_size, f"{name}.crc32" in manifest.get("files", {}))
        for name in names
    )


class PackedSamples:
    """A token stream cut into samples, in an order that is a function of (seed, position).

    Sample n of T tokens has the inputs [nT, nT + T) and the targets [nT + 1, nT + T + 1) of the stream: each token of
    the stream but the first is a target once an epoch (a last window that is not full is dropped).

    Args:
        dataset: the stream. seq_len: T. shuffle: False gives the order of the stream.
        complement: id -> id of the complementary base, int64. Half of the samples are then read from the other strand,
            its end first. None: no sample is.

    Raises:
        UserError: fewer than T + 1 tokens.
    """

    def __init__(
        self, dataset: IndexedDataset, seq_len: int, seed: int, shuffle: bool = True,
        complement: np.ndarray | None = None,
    ):  # fmt: skip
        self.dataset, self.seq_len, self.seed, self.shuffle = dataset, seq_len, seed, shuffle
        self.complement = complement
        self._n = (dataset.tokens - 1) // seq_len
        self._order: tuple[int, np.ndarray] | None = None
        if self._n < 1:
            raise UserError(
                f"data.seq_len: given {seq_len}; {dataset.prefix} has {dataset.tokens} tokens, and one "
                f"sample needs {seq_len + 1}: lower data.seq_len, or add text in data.sources"
            )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._n

    def index(self, position: int) -> int:
        """Number n in the stream of the sample at ``position`` >= 0, which counts over all epochs."""
        epoch, i = divmod(position, self._n)
        return int(self._permutation(epoch)[i]) if self.shuffle else i

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample at ``position``.

        Returns:
            ids: int64 (T + 1,), inputs ids[:-1] and targets ids[1:]. reset: bool (T,), True where the input token
            is the first of a document.
        """
        start, stop = self._range(position)
        ids, starts = self.dataset.read(start, stop).astype(np.int64), self.dataset.document_starts
        if self.complement is None or not self._turned(position):
            return ids, document_begins(starts, start, self.seq_len)
        # Read backwards, a document's eos comes first, and the token after it begins the document. The token at i
        # begins one if the stream has an eos at i + 1, that is, if a document of the stream begins at i + 2.
        reset = document_begins(starts, start + 3, self.seq_len)[::-1].copy()
        reset[1:2] |= stop == self.dataset.tokens  # the stream's last eos, behind which no document begins
        return self.complement[ids[::-1]], reset

    def stream(self, position: int) -> IndexedDataset:
        """The stream that the sample at ``position`` is cut from."""
        return self.dataset

    def describe(self, position: int) -> dict:
        """Origin of the sample at ``position``, for an error log.

        ``tokens`` is the range [start, stop) of the stream, ``documents`` the first and last document in it.
        ``other_strand`` is True where it is read from the other strand, and absent elsewhere.
        """
        start, stop = self._range(position)
        documents = [bisect_right(self.dataset.document_starts, token) - 1 for token in (start, stop - 1)]
        return {
            "position": position,
            "epoch": position // self._n,
            "sample": self.index(position),
            "tokens": [start, stop],
            "documents": documents,
            "file": f"{self.dataset.prefix}.bin",
            **({"other_strand": True} if self._turned(position) else {}),
        }

    def _turned(self, position: int) -> bool:
        return self.complement is not None and on_other_strand(self.seed, position)

    def _range(self, position: int) -> tuple[int, int]:
        start = self.index(position) * self.seq_len
        return start, start + self.seq_len + 1

    def _permutation(self, epoch: int) -> np.ndarray:
        """Order of an epoch's samples, uint32 or int64 (samples,): 15 MB for 15B tokens in samples of 4096.

        NumPy's policy freezes the numbers of RandomState: they are the same in all versions.
        """
        cached = self._order  # read once: the loader's thread may replace it
        if cached is None or cached[0] != epoch:
            words = [self.seed & _WORD, self.seed >> 32 & _WORD, epoch & _WORD, epoch >> 32]
            order = np.random.RandomState(words).permutation(self._n)
            self._order = cached = (epoch, order.astype(np.uint32) if self._n <= _WORD else order)
        return cached[1]


def on_other_strand(seed: int, position: int) -> bool:
    """Whether the sample at ``position`` is read from the other strand: half of them are."""
    return bool(np.random.default_rng([seed, position]).random() < 0.5)


class Mixture:
    """Samples of several streams by weight, in an order that is a function of (weights, position).

    The heaviest stream takes its share of all positions, evenly spaced. The next stream takes its share of the
    remaining positions, and so on down to the lightest. In ANY window of n positions, a stream with share w of the
    weight has n * w samples, off by less than 1 with two streams and by less than 2 + ln(k) with k streams. Each stream
    goes through its own epochs. Nothing is kept in memory.

    Args:
        streams: samples of the same length, PackedSamples or a task's own. weights: relative weight of each stream.
    """

    def __init__(self, streams: Sequence[Any], weights: Sequence[float]):
        self.streams, self.seq_len = streams, streams[0].seq_len
        exact = [Fraction(str(weight)) for weight in weights]  # as it was written: 0.3 is 3/10
        self._by_weight = sorted(range(len(streams)), key=lambda i: -exact[i])
        left = [exact[i] for i in self._by_weight]
        self._shares = [weight / sum(left[i:]) for i, weight in enumerate(left)]

    def __len__(self) -> int:
        """Samples of all streams once."""
        return sum(map(len, self.streams))

    def locate(self, position: int) -> tuple[int, int]:
        """(stream, position in that stream) of the sample at ``position``."""
        after = position + 1
        for stream, share in zip(self._by_weight, self._shares, strict=True):
            before, taken = (n * share.numerator // share.denominator for n in (position, after))
            if taken > before:
                return stream, before
            position, after = position - before, after - taken
        raise AssertionError("the last stream's share is 1")

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets: see :meth:`PackedSamples.sample`."""
        stream, position = self.locate(position)
        return self.streams[stream].sample(position)

    def stream(self, position: int) -> IndexedDataset:
        """Stream of a position: see :meth:`PackedSamples.stream`."""
        return self.streams[self.locate(position)[0]].dataset

    def describe(self, position: int) -> dict:
        """Origin of a sample: see :meth:`PackedSamples.describe`. ``position`` counts in the mixture, epoch and
        sample in the stream."""
        stream, own = self.locate(position)
        return self.streams[stream].describe(own) | {"position": position}
