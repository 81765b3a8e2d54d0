"""Tokenising parts of the text in many processes. A part is complete when its .json exists, which is written last.

part-NNNNNN.bin holds the tokens of all its documents, including duplicates and held-out ones; part-NNNNNN.parquet has
one row per document (see SCHEMA and ANSWERS), part-NNNNNN.json the counts; with data.near_duplicates
part-NNNNNN.sketches has a sketch of each document (near_duplicates.py). Their content does not depend on which process
wrote it.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from titans_pt.config import DataConfig, SourceConfig
from titans_pt.data_pipeline import sources
from titans_pt.data_pipeline.files import Rejected
from titans_pt.data_pipeline.indexed import token_dtype
from titans_pt.data_pipeline.kinds import Document, of_source
from titans_pt.data_pipeline.near_duplicates import sketch
from titans_pt.data_pipeline.sources import Part
from titans_pt.data_pipeline.text import one_line, visible
from titans_pt.data_pipeline.tokenizers import Tokenizer, encode_pieces, load_tokenizer
from titans_pt.data_pipeline.tokenizers.chat import chat_documents
from titans_pt.errors import UserError
from titans_pt.tools.files import flush_to_disk
from titans_pt.tools.sealed import seal, unseal
from titans_pt.tools.tensor_files import sha256

SCHEMA = pyarrow.schema(
    [
        ("file", pyarrow.string()),  # the file that the document is in
        ("row", pyarrow.int64()),  # its row there; in .jsonl and .txt the byte where it begins
        ("id", pyarrow.string()),  # from the source's id column, or empty
        ("hash", pyarrow.binary(16)),  # first half of the SHA-256 of its text, or of its ids (compares_ids)
        ("tokens", pyarrow.int32()),
        ("characters", pyarrow.int64()),
        ("held_out", pyarrow.bool_()),  # in the validation split
    ]
)
ANSWERS = pyarrow.field("answers", pyarrow.list_(pyarrow.int32()))
"""A further column of data with answers (DataConfig.marks_answers): begin and end of each answer, in tokens of the
document; null for a document of plain text, all of whose tokens count as an answer."""
FORMAT = 4
"""Parts of another format are not continued. Since 2 the ids of kind=indexed are hashed without bos and eos; since 3
characters are int64; since 4 text beside kind=indexed is hashed by its ids."""
LONGEST = 2**31 - 1
"""Most tokens of a document: their number is an int32."""
ROW_GROUP = 8192
"""Documents per row group. A group is read whole to find one document, and merged at once."""
CHECKED = (".parquet", ".sketches")
"""Files of a part, besides .bin, whose checksums are in its summary."""
_BATCH_CHARACTERS = 1_000_000
"""Text that is tokenised at once."""

Report = Callable[[int, int, int, int], None]
"""Adds to the progress that is shown: documents, tokens; bytes and tokens of finished parts."""


@dataclass(frozen=True)
class Job:
    """Common input of all parts of one ``titans prepare``."""

    data: DataConfig
    tokenizer: Path
    folder: Path
    threads: int = 1
    """Threads of the tokenizer library in each process."""


def schema(data: DataConfig) -> pyarrow.Schema:
    """Columns of a part's list of documents."""
    return SCHEMA.append(ANSWERS) if data.marks_answers else SCHEMA


def part_path(folder: Path, index: int, suffix: str) -> Path:
    return folder / f"part-{index:06d}{suffix}"


def read_summary(folder: Path, index: int) -> dict | None:
    """Counts of a part: documents, tokens, sha256 of .bin, source_sha256 (of the bytes it was read from),
    empty, filtered, rejected, round_trip (documents decoded again: tried, equal), files (sha256 of its other
    files by suffix). None for a part that is incomplete or damaged, and is then written again."""
    try:
        return unseal(part_path(folder, index, ".json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_parts(job: Job, parts: dict[int, Part], workers: int) -> None:
    """Writes the incomplete ones of ``parts`` (number -> part) on ``workers`` cores.

    Raises:
        UserError: unusable input; a process was killed. Complete parts stay.
        OSError: disk full, folder not writable.
    """
    todo = {index: part for index, part in parts.items() if read_summary(job.folder, index) is None}
    processes = max(1, min(workers, len(todo)))
    job = replace(job, threads=max(1, workers // processes))
    with _Progress(job.folder, parts, todo) as progress:
        if processes == 1:
            for index, part in todo.items():
                write_part(job, index, part, progress.add)
        else:
            _in_processes(job, list(todo.items()), processes, progress)


def _in_processes(job: Job, todo: list[tuple[int, Part]], processes: int, progress: "_Progress") -> None:
    # spawn: a forked process would inherit locks that threads of this one hold
    context = multiprocessing.get_context("spawn")
    following, counters, failures = context.Value("q", 0), context.Array("q", 4), context.SimpleQueue()
    counts: Any = counters.get_obj()  # read without the lock, which a killed process may hold
    team = [context.Process(target=_work, args=(job, todo, following, counters, failures)) for _ in range(processes)]
    for process in team:
        process.start()

    def check():
        if not failures.empty():
            raise failures.get()
        # each one's code is read once: a process may end between two reads
        for code in filter(None, [process.exitcode for process in team]):
            if code < 0:
                raise UserError(
                    f"titans prepare: a process was ended by signal {-code} (9: usually out of memory); run the same "
                    f"command again, with fewer --workers than {processes}: finished parts are kept"
                )
            raise RuntimeError("a process of titans prepare failed; its traceback is above")

    try:
        while waiting := [process.sentinel for process in team if process.is_alive()]:
            connection.wait(waiting, timeout=1.0)
            progress.set(*counts[:])
            check()
        check()  # the last process may have ended since
        progress.set(*counts[:])
    finally:
        for process in team:
            process.terminate()
        for process in team:
            process.join()


def _work(job: Job, todo: list[tuple[int, Part]], following, counters, failures) -> None:
    """Main loop of one process: takes the next part until there is none."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(job.threads))  # for rensa, which would take all cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(*more: int) -> None:
        with counters.get_lock():
            for i, value in enumerate(more):
                counters[i] += value

    try:
        while True:
            with following.get_lock():
                at, following.value = following.value, following.value + 1
            if at >= len(todo):
                return
            index, part = todo[at]
            write_part(job, index, part, report)
    except (UserError, OSError) as error:
        failures.put(error)


def _end_with_parent() -> None:
    """Ends this process with its parent: a killed parent cannot stop its workers, which would run for hours."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # only workers call this
    parent.join()
    os._exit(1)


# --- one part ---


def write_part(job: Job, index: int, part: Part, report: Report) -> None:
    """Writes part ``index``. Raises as :func:`write_parts`."""
    tokenizer = _tokenizer(job.tokenizer, job.data.tokenizer.eos_token, job.data.tokenizer.add_bos)
    source, counts = job.data.every_source[part.source], Counter(empty=0, filtered=0)
    rejected: list[Rejected] = []
    fraction = 1.0 if part.source < len(job.data.validation_sources) else validation_fraction(job.data)
    round_trip, checksum = Counter(tried=0, equal=0), hashlib.sha256()
    by_ids, bare = compares_ids(job.data), slice(len(tokenizer.begin), -1)  # without bos and eos
    # One name per process: after a kill, a second process may write the same part while the first still ends.
    sketched = job.data.near_duplicates is not None
    scratch = {
        suffix: part_path(job.folder, index, f".{socket.gethostname()}.{os.getpid()}{suffix}")
        for suffix in (".bin", ".parquet", *([".sketches"] if sketched else []), ".json")
    }
    reject = sources.refuse if job.data.bad_input == "refuse" else rejected.append
    found = _readable(sources.documents(source, part, counts, reject), source, tokenizer, counts, reject)
    try:
        with ExitStack() as stack:
            tokens = stack.enter_context(open(scratch[".bin"], "wb"))
            sketches = stack.enter_context(open(scratch[".sketches"], "wb")) if sketched else None
            table = stack.enter_context(open(scratch[".parquet"], "wb"))
            columns = schema(job.data)
            writer = _TableWriter(stack.enter_context(parquet.ParquetWriter(table, columns)), columns)
            for batch in _batches(found):
                encoded, answers = _encode(batch, tokenizer, job, round_trip)
                data = np.concatenate(encoded).tobytes()
                tokens.write(data)
                checksum.update(data)
                if sketches:
                    own_sketches = sketch(encoded)
                    own_sketches[[document.continued for document in batch]] = 0
                    sketches.write(own_sketches.tobytes())
                for document, ids, own in zip(batch, encoded, answers, strict=True):
                    digest = document_hash(ids[bare] if by_ids else document.text)
                    row = _described(document, len(ids), digest, fraction)
                    writer.add((*row, own) if job.data.marks_answers else row)
                report(len(batch), sum(map(len, encoded)), 0, 0)
            writer.flush()
        for path in scratch.values():
            if path != scratch[".json"]:
                flush_to_disk(path)
        read = hashlib.sha256()
        sources.hash_content(source, part, read.update)
        summary = {
            "documents": writer.documents,
            "tokens": writer.tokens,
            "sha256": checksum.hexdigest(),
            "source_sha256": read.hexdigest(),
            **counts,
            "rejected": [asdict(item) for item in rejected],
            "round_trip": dict(round_trip),
            "files": {suffix: sha256(scratch[suffix]) for suffix in scratch if suffix in CHECKED},
        }
        write_json(scratch[".json"], seal(summary))
        for suffix, path in scratch.items():
            os.replace(path, part_path(job.folder, index, suffix))
    finally:
        for path in scratch.values():
            path.unlink(missing_ok=True)
    report(0, 0, _weight(part), writer.tokens)


def _encode(
    batch: list[Document], tokenizer: Tokenizer, job: Job, round_trip: Counter
) -> tuple[list[np.ndarray], list[list[int] | None]]:
    """Ids of each document with its beginning (``Tokenizer.begin``) and its eos, and its answers (:data:`ANSWERS`)."""
    before, dtype = list(tokenizer.begin), token_dtype(tokenizer.vocab_size)
    answers: list[list[int] | None] = [None] * len(batch)
    encoded: Sequence[Sequence[int] | np.ndarray]
    if batch[0].tokens is not None:
        encoded = [document.tokens for document in batch if document.tokens is not None]
    elif batch[0].pieces:
        both = [encode_pieces(tokenizer, document.pieces, bool(document.messages)) for document in batch]
        encoded, answers = [ids for ids, _ in both], [own for _, own in both]
    else:
        encoded = of_texts = tokenizer.encode_batch([document.text for document in batch], job.threads)
        for document, ids in zip(batch, of_texts, strict=True):
            equal = tokenizer.gives_back(document.text, ids)
            round_trip.update(tried=1, equal=int(equal))
            if not equal and job.data.tokenizer.lossy == "refuse":
                raise UserError(_changed(document, tokenizer.decode(ids)))
    for document, one in zip(batch, encoded, strict=True):
        if (count := len(before) + len(one) + 1) > LONGEST:
            where = one_line(f"{document.file} row {document.row}")
            raise UserError(f"data.sources: the document at {where} has {count:,} tokens, at most {LONGEST:,} fit; "
                            "cut it, or set data.sources.N.separator (.txt)")  # fmt: skip
    whole = [np.concatenate([np.array(ids, dtype) for ids in (before, one, [tokenizer.eos_id])]) for one in encoded]
    return whole, answers


def _changed(document: Document, back: str) -> str:
    """Message on where a document and the text decoded from its tokens begin to differ."""
    at = len(os.path.commonprefix([document.text, back]))
    was, now = (repr(text[max(0, at - 10) : at + 10]) for text in (document.text, back))
    where = one_line(f"{document.file} row {document.row}")
    return (
        f"data.tokenizer.path: the document at {where} does not come back from its tokens: {was} becomes {now} at "
        f"character {at}; set another tokenizer, or data.tokenizer.lossy=warn"
    )


def _readable(
    documents: Iterator[Document], source: SourceConfig, tokenizer: Tokenizer, counts: Counter,
    reject: Callable[[Rejected], None],
) -> Iterator[Document]:  # fmt: skip
    """Yields ``documents``, those of ids (kind=indexed) without the bos and eos around them, chats as text.

    Documents of ids without a visible character are dropped and counted as empty.

    Raises:
        UserError: ids that the tokenizer does not have, or chats and a tokenizer without a chat template.
    """
    for document in documents:
        if document.messages:
            written = _written(document, source, tokenizer)
            if isinstance(written, Rejected):
                reject(written)
            else:
                yield from written
            continue
        if document.tokens is not None:
            ids = _bare(document, document.tokens, tokenizer)
            if not _visible(ids, tokenizer):
                counts["empty"] += 1
                continue
            document = replace(document, tokens=ids)
        yield document


def _written(document: Document, source: SourceConfig, tokenizer: Tokenizer) -> list[Document] | Rejected:
    """The documents of a chat, as the chat template writes it."""
    from jinja2 import TemplateError  # comes with torch, which only chats need here

    try:
        found = chat_documents(tokenizer, document.messages, source.answers == "last", document.tools)
    except (TemplateError, ValueError, TypeError) as error:
        where, what = one_line(f"{document.file}, row {document.row}"), " ".join(str(error).split())
        return Rejected(
            f"{where}, column {source.messages_column!r}",
            f"the chat cannot be written ({what})",
            "repair or remove the row, or write the prompts yourself (format=prompt-completion)",
        )
    texts = ["".join(text for text, _ in pieces) for pieces in found]
    opening = texts[0] if len(texts) > 1 else ""
    return [replace(document, text=text, pieces=tuple(pieces), opening=opening, continued=n < len(texts))
            for n, (text, pieces) in enumerate(zip(texts, found, strict=True), 1)]  # fmt: skip


def _bare(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of a document that another program made, without bos before them and eos behind them; int64."""
    ids = ids.astype(np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise UserError(
            f"data.sources: kind=indexed path={document.file!r}: document {document.row} has ids from "
            f"{ids.min()} to {ids.max()}, but the tokenizer {tokenizer.path} has {tokenizer.vocab_size}; "
            "set data.tokenizer.path to the one that made the token files"
        )
    start, stop = 0, len(ids)
    while start < stop and ids[start] == tokenizer.bos_id:
        start += 1
    while start < stop and ids[stop - 1] == tokenizer.eos_id:
        stop -= 1
    return ids[start:stop]


def _visible(ids: np.ndarray, tokenizer: Tokenizer) -> bool:
    """Whether the text of ``ids`` has a visible character. For most ids their piece tells; others are decoded."""
    return bool(_visible_pieces(tokenizer)[ids].any()) or visible(tokenizer.decode(ids.tolist()))


@lru_cache(1)
def _visible_pieces(tokenizer: Tokenizer) -> np.ndarray:
    """bool (vocab_size,): pieces that are ASCII and have a visible character."""
    return np.array([piece.isascii() and visible(piece.decode()) for piece in tokenizer.pieces])


def compares_ids(data: DataConfig) -> bool:
    """Whether all documents are compared by their ids: they are if one source has no text (kind=indexed), since a hash
    of text never equals a hash of ids."""
    return not all(of_source(source).has_text for source in data.every_source)


def document_hash(content: str | np.ndarray) -> bytes:
    """SHA-256 of a document's text, or of its ids without bos and eos (integers of any dtype, hashed as int64)."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content.astype("<i8").tobytes()).digest()


def validation_fraction(data: DataConfig) -> float:
    """The share of the documents of data.sources that is held out."""
    return 0.0 if data.validation_sources else data.validation_fraction


def held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document of this hash is in the validation split: stable when the corpus grows."""
    return int.from_bytes(digest[16:24], "big") / 2**64 < fraction


def _described(document: Document, tokens: int, digest: bytes, fraction: float) -> tuple:
    """A row of SCHEMA. digest: by :func:`document_hash`. A chat's documents are held out together: the later ones
    repeat the text of the earlier ones."""
    return (
        document.file,
        document.row,
        document.id,
        digest[:16],
        tokens,
        len(document.text),
        held_out(document_hash(document.opening) if document.opening else digest, fraction),
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text) if document.tokens is None else 4 * len(document.tokens)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@lru_cache(1)
def _tokenizer(path: Path, eos_token: str | None, add_bos: bool) -> Tokenizer:
    """Loads a tokenizer, which is kept from part to part: a large one takes a second to read."""
    return load_tokenizer(path, eos_token, add_bos)


class _TableWriter:
    """Rows of :func:`schema` to a parquet file, ROW_GROUP at a time."""

    def __init__(self, table: parquet.ParquetWriter, columns: pyarrow.Schema):
        self._table, self._columns = table, columns
        self._rows: list[tuple] = []
        self.documents = self.tokens = 0

    def add(self, row: tuple) -> None:
        self._rows.append(row)
        self.documents += 1
        self.tokens += row[4]
        if len(self._rows) == ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, self._columns, strict=True)]
            self._table.write_batch(pyarrow.record_batch(arrays, schema=self._columns), row_group_size=ROW_GROUP)
            self._rows = []


def write_json(path: Path, value: dict) -> None:
    """Writes one JSON object, and waits until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
    flush_to_disk(path)


# --- what is shown ---


def _weight(part: Part) -> int:
    return part.bytes or sources.PART_BYTES


class _Progress:
    """Progress bar: tokens, tokens/s, documents/s and the time left, estimated from the finished parts."""

    def __init__(self, folder: Path, parts: dict[int, Part], todo: dict[int, Part]):
        self._bytes = sum(_weight(part) for part in parts.values())
        done = [(part, summary) for index, part in parts.items()
                if index not in todo and (summary := read_summary(folder, index))]  # fmt: skip
        self._before = [
            sum(s["documents"] for _, s in done),
            sum(s["tokens"] for _, s in done),
            sum(_weight(part) for part, _ in done),
            sum(s["tokens"] for _, s in done),
        ]
        self._now = [0, 0, 0, 0]
        self._began = time.perf_counter()
        self._bar = tqdm(
            desc="tokenising",
            unit=" tokens",
            unit_scale=True,
            initial=self._before[1],
            mininterval=0.5 if os.isatty(2) else 30,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def add(self, *more: int) -> None:
        self.set(*(old + new for old, new in zip(self._now, more, strict=True)))

    def set(self, *now: int) -> None:
        self._now = list(now)
        documents, tokens, size, finished = (a + b for a, b in zip(self._before, now, strict=True))
        if size:
            self._bar.total = max(tokens, finished * self._bytes // size)
        speed = now[0] / max(time.perf_counter() - self._began, 1e-3)
        self._bar.set_postfix_str(f"{documents:,} documents, {speed:,.0f}/s", refresh=False)
        self._bar.update(tokens - self._bar.n)
