"""Report on token files: ``titans data inspect``."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from titans_pt.config import Config
from titans_pt.data_pipeline.answers import Answers
from titans_pt.data_pipeline.files import arrow_file, unit_of_place
from titans_pt.data_pipeline.indexed import REMEDY, IndexedDataset
from titans_pt.data_pipeline.manifest import MANIFEST, damage, read_manifest, refuse_damage
from titans_pt.data_pipeline.merge import REJECTED
from titans_pt.data_pipeline.packing import Mixture, PackedSamples, TokenFiles
from titans_pt.data_pipeline.text import one_line
from titans_pt.data_pipeline.tokenizers import Tokenizer
from titans_pt.errors import UserError
from titans_pt.tools.files import unreadable

_EXCERPT = 160
"""Characters shown of a document."""
_BAR = 40


def inspect_data(
    config: Config,
    sample: int | None = None,
    step: int | None = None,
    count: int = 1,
    documents: int = 3,
    verify: bool = False,
    opened: Callable[[], Any] | None = None,
) -> None:
    """Prints a report on the token files of ``config``, or with ``sample`` or ``step`` the samples of training there.

    Args:
        sample: position in the order of training: the number of samples consumed before it.
        step: optimiser step, from 1; its batch begins at sample (step - 1) * batch_tokens / seq_len, if all
            earlier steps had the same train.batch_tokens.
        count: samples to show from ``sample`` on.
        documents: documents of each stream to show, evenly spaced.
        verify: first read every file of data.dir and compare it with the manifest's checksums.
        opened: gives the training samples of a task that trains answers; None: samples are stretches of the stream.

    Raises:
        UserError: no token files, or files made with other settings; a checksum that differs.
    """
    folder = Path(config.data.dir)
    if verify and (manifest := read_manifest(folder)):
        _verify(folder, manifest)
    files = TokenFiles.open(config)
    if step is not None:
        count = config.train.batch_tokens // config.data.seq_len
        sample = (step - 1) * count
    if sample is not None:
        samples = opened() if opened else files.samples(config)
        for position in range(sample, sample + count):
            (_print_answers if opened else _print_sample)(samples, position, files.tokenizer)
        return
    _print_totals(config, files)
    if opened is None:
        _print_samples(config, files)
    for stream in (*files.train, files.validation):
        _print_lengths(stream)
        _print_documents(stream, documents, files.tokenizer)


def document_place(stream: IndexedDataset, j: int) -> dict:
    """file, row, id, hash, tokens and characters of document ``j`` of a stream; empty for files of format 1."""
    path = stream.list_of_documents
    if not path.exists():
        return {}
    try:
        with arrow_file(path) as file, parquet.ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if j < rows:
                    place = table.read_row_group(group).slice(j, 1).to_pylist()[0]
                    if not {"file", "row", "id"} <= place.keys():
                        raise ValueError("columns are missing")
                    return place
                j -= rows
    except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
        raise UserError(f"{path}: damaged ({unreadable(path, error)[:200]}); {REMEDY}") from None
    raise UserError(f"{path}: truncated, or of another run; {REMEDY}")


def _print_totals(config: Config, files: TokenFiles) -> None:
    manifest, data = files.manifest, config.data
    print(
        f"{one_line(data.dir)}: {len(files.train)} training stream{'s' * (len(files.train) > 1)}, "
        f"vocabulary {manifest['vocab_size']:,}, content {manifest['content'][:16]}"
    )
    for split, total in manifest["splits"].items():
        characters = total["characters"] / max(1, total["tokens"])
        print(
            f"{split}: {total['documents']:,} documents, {total['tokens']:,} tokens, "
            f"{total['characters']:,} characters ({characters:.2f} per token)"
        )
    if left_out := manifest.get("dropped"):  # format 1 does not say
        dropped = ", ".join(f"{number:,} {kind}" for kind, number in left_out.items())
        print(f"dropped: {dropped}" + (f" (see {REJECTED})" if left_out.get("rejected") else ""))
    if (trip := manifest.get("round_trip")) and trip["tried"]:
        print(f"decoded again: {trip['equal']:,} of {trip['tried']:,} documents tried come back equal")
    if lost := manifest.get("lost_kinds"):
        print(f"the tokenizer loses {', '.join(lost)}")
    if data.marks_answers:
        for stream in (*files.train, files.validation):
            answers = Answers(stream)
            print(f"{stream.prefix.name}: {answers.count:,} answers marked in {answers.documents:,} documents")


def _print_samples(config: Config, files: TokenFiles) -> None:
    data, samples = config.data, files.samples(config)
    batch = config.train.batch_tokens // data.seq_len
    print(
        f"samples of {data.seq_len:,} tokens: {len(samples):,} per epoch, "
        f"{len(samples) / batch:,.1f} batches of {batch}"
    )
    if isinstance(samples, Mixture):
        total = sum(data.weights)
        for stream, weight in zip(samples.streams, data.weights, strict=True):
            epochs = weight / total * config.train.max_steps * batch / len(stream)
            print(
                f"  {stream.dataset.prefix.name}: {weight / total:.1%} of samples, {len(stream):,} per epoch, "
                f"{epochs:.2f} epochs in train.max_steps={config.train.max_steps}"
            )


def _print_lengths(stream: IndexedDataset) -> None:
    """Prints a histogram of document lengths by powers of two."""
    counts = np.zeros(32, np.int64)
    for lengths in stream.lengths():
        counts += np.bincount(np.frexp(np.maximum(lengths, 1))[1] - 1, minlength=32)
    print(f"\n{stream.prefix.name}: {len(stream.document_starts):,} documents, {stream.tokens:,} tokens; by tokens:")
    powers = np.flatnonzero(counts)
    for power in range(powers[0], powers[-1] + 1) if len(powers) else ():
        bar = "#" * int(-(-_BAR * counts[power] // counts.max()))
        print(f"  {2**power:>9,} to {2 ** (power + 1) - 1:>9,} {counts[power]:>12,} {bar}".rstrip())


def _print_documents(stream: IndexedDataset, count: int, tokenizer: Tokenizer) -> None:
    total = len(stream.document_starts)
    for j in sorted({total * i // count for i in range(count)} if total and count else ()):
        _print_document(stream, j, stream.document(j), tokenizer)


def _print_document(stream: IndexedDataset, j: int, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    """Prints the origin of document ``j`` and the beginning of ``ids``, all or some of its tokens."""
    place = document_place(stream, j)
    where = "(format 1: no place kept)"
    if place:
        unit = unit_of_place(place["file"])
        where = one_line(f"{place['file']} {unit} {place['row']} id {place['id'] or '-'}")
    text = tokenizer.decode(ids[: 4 * _EXCERPT].tolist())
    print(
        f"  document {j} of {stream.prefix.name}: {where}, {len(ids):,} tokens: "
        f"{text[:_EXCERPT]!r}{'...' * (len(text) > _EXCERPT)}"
    )


def _print_sample(samples: PackedSamples | Mixture, position: int, tokenizer: Tokenizer) -> None:
    """Prints the origin of a sample and its documents as training reads them: last one first on the other strand."""
    found, (ids, *_) = samples.describe(position), samples.sample(position)
    stream, turned = samples.stream(position), "other_strand" in found
    start, stop = found["tokens"]
    print(
        f"sample {position}: {one_line(found['file'])} epoch {found['epoch']} sample {found['sample']}, "
        f"tokens {start} to {stop - 1}{', read backwards from the other strand' * turned}"
    )
    first, last = found["documents"]
    for j in range(first, last + 1)[:: -1 if turned else 1]:
        begin = stream.document_starts[j]
        end = stream.document_starts[j + 1] if j + 1 < len(stream.document_starts) else stream.tokens
        if begin < end:
            own = slice(max(begin, start) - start, min(end, stop) - start)
            _print_document(stream, j, ids[::-1][own][::-1] if turned else ids[own], tokenizer)


def _print_answers(samples: Any, position: int, tokenizer: Tokenizer) -> None:
    """Prints a row of documents with answers: the origin of the row, then each document with its answers in quotes."""
    ids, reset, asked = samples.sample(position)
    origin = ", ".join(f"{name} {value}" for name, value in samples.describe(position).items() if name != "position")
    print(f"sample {position}: {one_line(origin)}")
    starts = [*np.flatnonzero(reset), len(reset)]
    for start, stop in pairwise(starts):
        before = np.flatnonzero(asked[start:stop]) + start
        if not len(before):
            continue  # the rest of a row
        answers = np.split(ids[before + 1], np.flatnonzero(np.diff(before) > 1) + 1)
        text = tokenizer.decode(ids[start:stop].tolist())
        told = ", ".join(repr(tokenizer.decode(each.tolist())[:_EXCERPT]) for each in answers)
        cut = f"{text[:_EXCERPT]!r}..." if len(text) > _EXCERPT else repr(text)
        print(f"  {stop - start:,} tokens: {cut}; trained: {told}")


def _verify(folder: Path, manifest: dict) -> None:
    """Prints a line for each file of ``folder`` that training or inspection reads.

    Raises:
        UserError: a file differs from what was written.
    """
    wrong, listed = damage(folder, manifest), manifest.get("files", {})
    for name, written in listed.items():
        sound = f"{written['bytes']:,} bytes, checksum correct"
        print(f"{name}: {wrong.get(name, sound)}")
    others = sorted(path.name for path in folder.iterdir() if path.name not in listed and path.is_file())
    for name in others:
        if name != MANIFEST and not name.startswith("."):
            print(
                f"{name}: not in {MANIFEST}, and has no checksum (another program's file, or token files of an "
                "earlier version: titans prepare CONFIG --force makes them again)"
            )
    refuse_damage(folder, wrong)
