"""Text to token files: what ``titans prepare`` does.

data.dir then holds train.bin/.idx, validation.bin/.idx (see :mod:`data_pipeline.indexed`), tokenizer.model, and
manifest.json, which is written last: a folder with a manifest is complete.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_pipeline import sources
from data_pipeline.indexed import IndexedWriter
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from titans_pt.config import Config
from titans_pt.errors import UserError

FORMAT = 1
SPLITS = ("train", "validation")
_BATCH_CHARACTERS = 1_000_000
"""Text that is tokenised at once, by all cores."""


def prepare(config: Config, force: bool = False) -> dict:
    """Writes the token files of ``config`` to data.dir and returns their manifest.

    Each document ends with eos, which is the boundary between documents. Exact duplicates are dropped. Whether a
    document is held out depends on its text alone, so it stays where it is when the sources grow. Nothing is done
    if the folder already holds what these settings and sources give. The files are built in a subfolder and
    moved into place when all are complete, the manifest last.

    Args:
        force: build anew, and replace token files that other settings or sources gave.

    Returns:
        The manifest: format, fingerprint (of settings and sources), content (hash of the token files), settings,
        tokenizer_sha256, vocab_size, splits (documents, tokens, characters of each), dropped (empty, duplicate),
        unigram_loss (nats per validation token under the add-one-smoothed token frequencies of train).

    Raises:
        UserError: bad source, tokenizer and model.vocab_size that disagree, an empty split, folder not writable,
            disk full, token files of other settings in data.dir. The folder is then as it was before; only if
            the last step, moving the files into place, fails can it be left without a manifest, that is, empty.
    """
    folder = Path(config.data.dir)
    fingerprint = _fingerprint(config)
    if (old := read_manifest(folder)) and not force:
        if old.get("fingerprint") == fingerprint:
            print(f"{folder}: token files are up to date, nothing to do", file=sys.stderr)
            return old
        what = changed_setting(old, config) or "the text of data.sources has changed"
        raise UserError(f"data.dir={config.data.dir}: holds token files of other settings ({what}); "
                        "choose another data.dir, or replace them with: titans prepare --force")
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as build:
            manifest = _build(config, build) | {"fingerprint": fingerprint}
            _write_json(build / "manifest.json", manifest)
            _move(build, folder)
    except OSError as error:
        reason = "disk full; free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (
            f"{error.strerror or error}; make the folder writable")
        raise UserError(f"data.dir={config.data.dir}: cannot write token files: {reason}, "
                        "or choose another data.dir") from error
    finally:
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was put into it
    return manifest


def read_manifest(folder: Path) -> dict | None:
    """manifest.json of a folder; None where there is none that can be read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def changed_setting(manifest: dict, config: Config) -> str | None:
    """The first setting in which token files and ``config`` differ, with both values; None if there is none."""
    if manifest.get("format") != FORMAT:
        return f"file format {manifest.get('format')}, this version writes {FORMAT}"
    for name, now in _settings(config).items():
        if (then := manifest["settings"].get(name)) != now:
            return f"{name}: made with {json.dumps(then)}, config has {json.dumps(now)}"
    return None


def _settings(config: Config) -> dict:
    """The settings that decide what is in the token files, by path."""
    data = config.data.model_dump(mode="json")
    chosen = {f"data.{name}": data[name] for name in ("sources", "tokenizer", "validation_fraction")}
    return {"model.vocab_size": config.model.vocab_size, **chosen}


def _fingerprint(config: Config) -> str:
    path = config.data.tokenizer.path
    parts = [FORMAT, _settings(config), path and Tokenizer.load(path).sha256]
    parts += [sources.fingerprint(source) for source in config.data.sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# --- building, in a folder of its own ---


def _build(config: Config, build: Path) -> dict:
    """Writes tokenizer.model and both splits to ``build``; returns the manifest without its fingerprint."""
    tokenizer = _tokenizer(config, build / "tokenizer.model")
    counts = {split: Counter(documents=0, tokens=0, characters=0) for split in SPLITS}
    seen = {split: np.zeros(tokenizer.vocab_size, np.int64) for split in SPLITS}  # times each token occurs
    dropped = Counter(empty=0, duplicate=0)
    with contextlib.ExitStack() as stack:
        writers = {s: stack.enter_context(IndexedWriter(build / s, tokenizer.vocab_size)) for s in SPLITS}
        bar = stack.enter_context(tqdm(desc="tokenising", unit=" tokens", unit_scale=True, file=sys.stderr,
                                       mininterval=0.5 if sys.stderr.isatty() else 30))
        for batch in _batches(_unique(config, dropped)):
            for (split, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                ids.append(tokenizer.eos_id)
                writers[split].add(ids)
                seen[split] += np.bincount(ids, minlength=tokenizer.vocab_size)
                counts[split].update(documents=1, tokens=len(ids), characters=len(text))
                bar.update(len(ids))
    total = sum(count["documents"] for count in counts.values())
    for split in SPLITS:
        if not counts[split]["documents"]:
            raise UserError(f"data.validation_fraction={config.data.validation_fraction}: of {total} documents none "
                            f"fell to the {split} split; add text in data.sources"
                            + (", or raise the fraction (below 0.5)" if split == "validation" else ""))
    hashes = [writers[split].sha256 for split in SPLITS] + [tokenizer.sha256]
    return {
        "format": FORMAT,
        "content": hashlib.sha256("".join(hashes).encode()).hexdigest(),
        "settings": _settings(config),
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "splits": {split: dict(counts[split]) for split in SPLITS},
        "dropped": dict(dropped),
        "unigram_loss": unigram_loss(seen["train"], seen["validation"]),
    }


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Mean nats per token of ``validation`` under the frequencies of ``train``, each raised by one.

    Both are int64 (vocab_size,), how often each token occurs. What a model must beat to use any context at all.
    """
    log_p = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation @ log_p) / validation.sum())


def _tokenizer(config: Config, path: Path) -> Tokenizer:
    """The tokenizer at ``path``: a copy of the one that is given, or trained on the training split."""
    given, size = config.data.tokenizer.path, config.model.vocab_size
    if given is None:
        texts = (text for split, text in _unique(config, Counter(), interleave=True) if split == "train")
        return train_tokenizer(texts, path, size, config.data.tokenizer.train_characters)
    tokenizer = Tokenizer.load(given)
    if tokenizer.vocab_size != size:
        raise UserError(f"model.vocab_size: given {size}, but the tokenizer {given} has {tokenizer.vocab_size}: "
                        f"set model.vocab_size={tokenizer.vocab_size}, or another data.tokenizer.path")
    shutil.copyfile(given, path)
    return Tokenizer.load(path)


def _unique(config: Config, dropped: Counter, interleave: bool = False) -> Iterator[tuple[str, str]]:
    """(split, text) of each document; exact duplicates are dropped.

    Source by source, or one document of each in turn, so that a limited sample has all of them.
    """
    streams = [sources.documents(source, dropped) for source in config.data.sources]
    known: set[bytes] = set()
    for text in _in_turn(streams) if interleave else (text for stream in streams for text in stream):
        digest = hashlib.sha256(text.encode()).digest()
        if digest[:16] in known:  # half the hash: a set of millions stays small, and chance stays out of the question
            dropped["duplicate"] += 1
            continue
        known.add(digest[:16])
        share = int.from_bytes(digest[16:24], "big") / 2**64
        yield "validation" if share < config.data.validation_fraction else "train", text


def _in_turn(streams: list[Iterator[str]]) -> Iterator[str]:
    while streams:
        going = []
        for stream in streams:
            for text in stream:
                yield text
                going.append(stream)
                break
        streams = going


def _batches(items: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, characters = [], 0
    for item in items:
        batch.append(item)
        characters += len(item[1])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- files ---


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """An empty subfolder to build in, removed afterwards; one process at a time.

    Inside ``folder``, not beside it: only there is a rename to its final place sure to stay on one file system.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"data.dir={folder}: another titans prepare is at work there; wait for it, "
                            "or choose another data.dir") from None
        except OSError:
            pass  # a file system without locks
        build = folder / ".preparing"
        shutil.rmtree(build, ignore_errors=True)  # left by a process that was killed
        try:
            build.mkdir()
            yield build
        finally:
            shutil.rmtree(build, ignore_errors=True)
    finally:
        os.close(handle)


def _move(build: Path, folder: Path) -> None:
    """Moves all files into place. Without its manifest, a folder that is half moved counts as empty."""
    (folder / "manifest.json").unlink(missing_ok=True)
    for path in sorted(build.iterdir(), key=lambda path: (path.name == "manifest.json", path.name)):
        os.replace(path, folder / path.name)


def _write_json(path: Path, value: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
