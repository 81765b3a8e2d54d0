"""Parts to token files: without duplicates, one file per split, everything in the order of the sources."""

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from titans_pt.data_pipeline import near_duplicates
from titans_pt.data_pipeline.files import arrow_file
from titans_pt.data_pipeline.indexed import IndexedWriter, token_dtype
from titans_pt.data_pipeline.kinds import LETTER
from titans_pt.data_pipeline.parts import ROW_GROUP, part_path, read_summary
from titans_pt.data_pipeline.sources import Part
from titans_pt.errors import UserError
from titans_pt.tools.tensor_files import sha256

SPLITS = ("train", "validation")
REJECTED = "rejected.jsonl"
_BUCKET_DOCUMENTS = 1 << 21
"""Documents whose hashes are sorted at once: about 150 MB."""
_HASH = np.dtype([("high", ">u8"), ("low", ">u8"), ("document", "<i8")])


def merge(
    parts: list[Part], folder: Path, out: Path, vocab_size: int, streams: list[str], schema: pyarrow.Schema,
    near: float | None = None,
) -> dict:  # fmt: skip
    """Writes the token files of all ``parts``, which lie complete in ``folder``, to the empty folder ``out``.

    Memory is bounded, whatever the parts hold: hashes are sorted by buckets on disk, tokens copied by row groups.

    Args:
        streams: for each source the name of its training stream; "validation" where it has none.
        schema: columns of the parts' lists of documents. NAME.documents.parquet has all but held_out: one row per
            document, in the order of NAME.idx.
        near: data.near_duplicates.

    Returns:
        Entries of the manifest: source_sha256 (see :func:`hash_parts`), files (bytes and sha256 of each .bin), splits
        (documents, tokens, characters), dropped (empty, duplicate, with ``near`` near_duplicate, filtered, rejected),
        round_trip, letters (counts of letters other than A, C, G and T in FASTA files),
        unigram_loss.

    Raises:
        UserError: a part was changed. OSError: disk full, folder not writable.
    """
    summaries = [_summary(folder, index) for index in range(len(parts))]
    for index, summary in enumerate(summaries):
        for suffix, checksum in summary.get("files", {}).items():
            if sha256(part_path(folder, index, suffix)) != checksum:
                raise _changed(folder, index, suffix)
    sizes = [summary["documents"] for summary in summaries]
    duplicate = _duplicates(folder, sizes, out)
    dropped = Counter(empty=0, duplicate=int(np.count_nonzero(duplicate)), filtered=0)
    if near is not None:
        dropped["near_duplicate"] = _near_duplicates(folder, len(sizes), out, duplicate, near)
    names = [name for name in dict.fromkeys(streams) if name != "validation"] + ["validation"]
    columns = schema.remove(schema.get_field_index("held_out"))
    counts = {split: Counter(documents=0, tokens=0, characters=0) for split in SPLITS}
    seen = {split: np.zeros(vocab_size, np.int64) for split in SPLITS}  # times each token occurs
    first = np.cumsum([0, *sizes])
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_StreamWriter(out, name, vocab_size, columns)) for name in names}
        bar = stack.enter_context(
            tqdm(
                desc="merging",
                unit=" tokens",
                unit_scale=True,
                dynamic_ncols=True,
                total=sum(summary["tokens"] for summary in summaries),
                mininterval=0.5 if os.isatty(2) else 30,
            )
        )
        for index, part in enumerate(parts):
            document = int(first[index])
            for table, tokens in _with_tokens(folder, index, token_dtype(vocab_size), summaries[index]["sha256"]):
                lengths, held_out = (np.asarray(table[name]) for name in ("tokens", "held_out"))
                kept = ~duplicate[document : document + len(lengths)].astype(bool)
                for split, chosen in (("train", kept & ~held_out), ("validation", kept & held_out)):
                    some = tokens[np.repeat(chosen, lengths)]
                    rows = table.filter(pyarrow.array(chosen)).select(columns.names)
                    writers[streams[part.source] if split == "train" else split].extend(some, lengths[chosen], rows)
                    seen[split] += np.bincount(some, minlength=vocab_size)
                    counts[split].update(
                        documents=len(rows), tokens=len(some), characters=int(np.asarray(rows["characters"]).sum())
                    )
                document += len(lengths)
                bar.update(len(tokens))
    round_trip, letters = Counter(tried=0, equal=0), Counter[str]()
    for summary in summaries:
        letters.update({key.removeprefix(LETTER): n for key, n in summary.items() if key.startswith(LETTER) and n})
        dropped.update({key: summary[key] for key in ("empty", "filtered")})
        round_trip.update(summary["round_trip"])
    del duplicate
    (out / _DUPLICATES).unlink()
    return {
        "source_sha256": hash_parts(summary.get("source_sha256", "") for summary in summaries),
        "files": {f"{name}.bin": {"bytes": writers[name].bytes, "sha256": writers[name].sha256} for name in names},
        "splits": {split: dict(counts[split]) for split in SPLITS},
        "dropped": dict(dropped) | {"rejected": _write_rejected(summaries, out)},
        "round_trip": dict(round_trip),
        **({"letters": dict(sorted(letters.items()))} if letters else {}),
        "unigram_loss": unigram_loss(seen["train"], seen["validation"]) if seen["validation"].any() else None,
    }


def hash_parts(hashes: Iterable[str]) -> str:
    """SHA-256 (hex) of the bytes that all parts were read from, given the hash of each part."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Mean nats per token of ``validation`` under the frequencies of ``train``, each count raised by one.

    Both are int64 (vocab_size,), how often each token occurs. A model that uses any context must beat this loss.
    """
    log_p = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation @ log_p) / validation.sum())


# --- duplicates ---

_DUPLICATES = "duplicates"


def _duplicates(folder: Path, sizes: list[int], out: Path) -> np.ndarray:
    """uint8 (documents of all parts,), on disk: 1 where an earlier document has the same hash.

    The hashes go to buckets by their first bytes: equal ones meet in one bucket, which is then sorted in memory.
    """
    total, path = sum(sizes), out / _DUPLICATES
    with open(path, "wb") as file:
        file.truncate(max(1, total))
    mask = np.memmap(path, np.uint8, "r+")
    count = -(-total // _BUCKET_DOCUMENTS)
    with ExitStack() as stack:
        buckets = [stack.enter_context(open(out / f"bucket-{i}", "w+b")) for i in range(count)]
        document = 0
        for index in range(len(sizes)):
            for table in _row_groups(part_path(folder, index, ".parquet"), ["hash"]):
                entries = np.zeros(len(table), _HASH)
                halves = np.frombuffer(b"".join(table["hash"].to_pylist()), ">u8").reshape(-1, 2)
                entries["high"], entries["low"] = halves.T
                entries["document"] = np.arange(document, document + len(table))
                document += len(table)
                bucket = (entries["high"] >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)
                for i in np.unique(bucket):
                    buckets[int(i)].write(entries[bucket == i].tobytes())
        for stored in buckets:
            stored.seek(0)
            entries = np.frombuffer(stored.read(), _HASH)
            entries = entries[np.lexsort((entries["low"], entries["high"]))]  # stable: the first of equals stays first
            same = (entries["high"][1:] == entries["high"][:-1]) & (entries["low"][1:] == entries["low"][:-1])
            mask[entries["document"][1:][same]] = 1
            os.unlink(stored.name)
    return mask


def _near_duplicates(folder: Path, parts: int, out: Path, duplicate: np.ndarray, threshold: float) -> int:
    """Marks in ``duplicate`` the documents that resemble an earlier one; returns how many."""
    path = out / "sketches"
    with open(path, "wb") as whole:
        for index in range(parts):
            with open(part_path(folder, index, ".sketches"), "rb") as part:
                shutil.copyfileobj(part, whole, 1 << 24)
    found = near_duplicates.mark(path, duplicate, threshold)
    path.unlink()
    return found


# --- reading parts, writing streams ---


def _summary(folder: Path, index: int) -> dict:
    """Counts of a part (:func:`read_summary`). Raises UserError for an incomplete or damaged part."""
    summary = read_summary(folder, index)
    if summary is None:
        raise _changed(folder, index, ".json")
    return summary


def _row_groups(path: Path, columns: list[str] | None = None):
    with arrow_file(path) as handle, parquet.ParquetFile(handle) as file:
        for i in range(file.num_row_groups):
            yield file.read_row_group(i, columns)


def _with_tokens(folder: Path, index: int, dtype: np.dtype, sha256: str) -> Iterator[tuple[pyarrow.Table, np.ndarray]]:
    """Yields the row groups of a part, each with the tokens of its documents.

    Raises:
        UserError: (after the last) the tokens do not have this checksum.
    """
    checksum, at = hashlib.sha256(), 0
    tokens = _mapped(part_path(folder, index, ".bin"), dtype)
    for table in _row_groups(part_path(folder, index, ".parquet")):
        here = tokens[at : at + int(np.asarray(table["tokens"]).sum())]
        checksum.update(here.data)
        at += len(here)
        yield table, here
    if checksum.hexdigest() != sha256:
        raise _changed(folder, index, ".bin")


def _changed(folder: Path, index: int, suffix: str) -> UserError:
    return UserError(
        f"{part_path(folder, index, suffix)}: not the file that was written; remove "
        f"{part_path(folder, index, '.json')} and run titans prepare again"
    )


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


class _StreamWriter:
    """NAME.bin, NAME.idx and NAME.documents.parquet, complete at the end of the block."""

    def __init__(self, folder: Path, name: str, vocab_size: int, columns: pyarrow.Schema):
        self._tokens = IndexedWriter(folder / name, vocab_size)
        self._file = open(folder / f"{name}.documents.parquet", "wb")  # noqa: SIM115  pyarrow opens no name but UTF-8
        self._documents = parquet.ParquetWriter(self._file, columns)
        self._rows: list[pyarrow.Table] = []
        self.bytes = 0

    def __enter__(self) -> "_StreamWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self._flush(1)
        self._documents.close()
        self._file.close()
        self._tokens.__exit__(kind)

    @property
    def sha256(self) -> str:
        return self._tokens.sha256

    def extend(self, tokens: np.ndarray, lengths: np.ndarray, rows: pyarrow.Table) -> None:
        self._tokens.extend(tokens, lengths)
        self._rows.append(rows)
        self.bytes += tokens.nbytes
        self._flush(ROW_GROUP)

    def _flush(self, least: int) -> None:
        """Writes the waiting rows if there are at least ``least``: small parts would make small row groups."""
        if sum(map(len, self._rows)) >= least:
            self._documents.write_table(pyarrow.concat_tables(self._rows), row_group_size=ROW_GROUP)
            self._rows = []


def _write_rejected(summaries: list[dict], out: Path) -> int:
    """Lists rejected input in a file, one JSON object per line; returns how many. Writes no file if there is none."""
    rejected = [item for summary in summaries for item in summary["rejected"]]
    if rejected:
        (out / REJECTED).write_text("".join(json.dumps(item) + "\n" for item in rejected), encoding="utf-8")
        print(
            f"titans prepare: {len(rejected)} unusable inputs were left out; the first: {rejected[0]['where']}: "
            f"{rejected[0]['reason']}; {rejected[0]['remedy']}; all are listed in {REJECTED}",
            file=sys.stderr,
        )
    return len(rejected)
