"""Text to token files: the work of ``titans prepare``.

data.dir then holds train.bin/.idx (train-0, train-1, ... where the sources have weights), validation.bin/.idx (see
indexed.py), a .documents.parquet next to each, the tokenizer, and manifest.json, which is written
last: a folder with a manifest is complete.

Work is cut into parts (parts.py). Any number of processes on any number of nodes write the parts, each once, to
.preparing/ in that folder; then one process merges them (merge.py). The result is the same, byte for byte, whichever
processes wrote the parts and however often they were killed.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from titans_pt.config import Config, DataConfig
from titans_pt.data_pipeline import files, sources
from titans_pt.data_pipeline.files import Rejected
from titans_pt.data_pipeline.indexed import IndexedDataset
from titans_pt.data_pipeline.kinds import Document, of_source
from titans_pt.data_pipeline.manifest import (
    FORMAT,
    MANIFEST,
    changed_setting,
    content_settings,
    damage,
    read_manifest,
    refuse_damage,
    streams,
)
from titans_pt.data_pipeline.merge import REJECTED, SPLITS, hash_parts, merge
from titans_pt.data_pipeline.packing import TokenFiles
from titans_pt.data_pipeline.parts import FORMAT as PARTS
from titans_pt.data_pipeline.parts import (
    Job,
    document_hash,
    held_out,
    read_summary,
    schema,
    validation_fraction,
    write_json,
    write_parts,
)
from titans_pt.data_pipeline.text import one_line, utf8
from titans_pt.data_pipeline.tokenizers import (
    FILES,
    NucleotideTokenizer,
    Tokenizer,
    load_tokenizer,
    lost_kinds,
    saved_tokenizer,
    train_tokenizer,
)
from titans_pt.errors import Unreachable, UserError
from titans_pt.genomics.markov import Floor, markov_floor
from titans_pt.tools.files import DISK_FAILED, naming, write_atomically
from titans_pt.tools.locks import folder_locked
from titans_pt.tools.sealed import seal
from titans_pt.tools.tensor_files import describe

_BUILD = ".preparing"
_COUNTED = 1 << 26
"""Most bases on which Markov chains are counted: 1.5 GB of memory, two minutes."""
_NAMED = 100
"""Most names of ignored files in the manifest."""
_OURS = re.compile(
    r"(train(-\d+)?|validation)\.(bin|idx|crc32|documents\.parquet)|tokenizer(_config)?\.(model|json)|"
    r"rejected\.jsonl"
)


def prepare(config: Config, force: bool = False, shard: tuple[int, int] | None = None, workers: int = 1) -> dict | None:
    """Writes the token files of ``config`` to data.dir and returns their manifest.

    Each document ends with eos, which is the boundary between documents. Exact duplicates are dropped. Whether a
    document is held out depends on its text alone (on its ids, with a source of kind=indexed): it stays in its
    split when the sources grow. Nothing is done if the folder already holds the result of these settings and sources.
    After a stop of any kind the same call continues with the missing parts.

    Args:
        force: replace token files made with other settings or sources.
        shard: (i, n): write only every n-th part, from part i on, and no token files. A later call without it
            completes them.
        workers: cores to use.

    Returns:
        The manifest; None with ``shard``. Its keys: format, fingerprint (of settings and sources), text (the same
        without modification times), content (hash of the token files), settings, tokenizer_sha256, vocab_size, streams
        (names of the training streams), ignored (count and first names of files that are not read) and those of
        :func:`titans_pt.data_pipeline.merge.merge`; its ``files`` also get bytes and sha256 of every other file.

    Raises:
        UserError: bad source, a tokenizer of more entries than model.vocab_size, an empty split, folder not writable,
            disk full, a damaged manifest, token files of other settings in data.dir. Files in the folder stay. If
            the last step fails, which moves new files into place, they may lack a manifest: they then count as none.
        OSError: the disk failed, one of DISK_FAILED.
    """
    folder = Path(config.data.dir)
    old = None if force else read_manifest(folder)
    _check_apart(config, folder)
    if old is None and not force:
        _check_own(folder)
    unchanged = old if old is not None and changed_setting(old, config) is None else None
    made = unchanged["settings"] if unchanged else None  # the same settings, with the paths as they were spelled
    try:
        fingerprint, text = _fingerprints(config, settings=made)
    except Unreachable as error:
        if unchanged:
            _check_lossy(unchanged, config)
            _check_rejected(unchanged, config, folder)
            print(
                f"{folder}: holds token files made with these settings, nothing to do; whether the text has changed "
                f"since cannot be told: {error}",
                file=sys.stderr,
            )
            return unchanged
        fingerprint, text = _fingerprints(config, cached=True, settings=made)
    if old:
        _check_up_to_date(old, config, fingerprint, text)
        return old
    if config.data.bad_input == "refuse":  # now, not after hours of work on earlier input
        for rejected in (one for source in config.data.every_source for one in sources.obstacles(source)):
            sources.refuse(rejected)
    created, began = not folder.exists(), time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with naming(folder), folder_locked(folder, "data.dir", "titans prepare", shared=shard is not None):
            # Named by its inputs: parts begun with other settings or text are never mistaken for ours.
            inputs = f"{PARTS} {fingerprint}{''.join(_names(config.data))}"
            build = folder / _BUILD / hashlib.sha256(inputs.encode()).hexdigest()[:16]
            build.mkdir(parents=True, exist_ok=True)
            try:
                manifest = _build(config, build, {"fingerprint": fingerprint, "text": text}, shard, workers)
                if shard is None:
                    _move(build / "merged", folder)
                    shutil.rmtree(folder / _BUILD, ignore_errors=True)
            finally:
                if shard is None:  # else other processes may be at work there
                    _keep_finished(build)
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "disk full; free space" if full else f"{error.strerror or error}; make the folder writable"
        raise UserError(
            f"data.dir={config.data.dir}: cannot write token files: {reason}, or choose another data.dir"
        ) from error
    finally:
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if nothing was put into it
    if manifest is not None:
        print(summary(manifest, folder, time.perf_counter() - began), file=sys.stderr)
        _warn_of_short_streams(config)
    return manifest


def _check_up_to_date(old: dict, config: Config, fingerprint: str, text: str) -> None:
    """Checks that the token files of the manifest ``old`` are the result of these settings and sources, and tells so.

    Raises:
        UserError: they are not, or they are damaged.
    """
    folder, other_names = Path(config.data.dir), ""
    if old.get("fingerprint") != fingerprint and _only_touched(old, config, text):
        old["fingerprint"] = fingerprint
        with contextlib.suppress(OSError):  # a read-only folder: the next call compares again
            write_atomically(folder / MANIFEST, lambda path: write_json(path, seal(old)))
    if old.get("fingerprint") == fingerprint:
        refuse_damage(folder, damage(folder, old, read=False))
        other_names = _other_names(config.data, saved_tokenizer(folder))
        if not other_names:
            _check_lossy(old, config)
            _check_rejected(old, config, folder)
            print(f"{one_line(str(folder))}: token files are up to date, nothing to do", file=sys.stderr)
            with contextlib.suppress(UserError), folder_locked(folder, "data.dir", "titans prepare"):
                # Left by a process that was killed at its very end, unless another is at work (with --force).
                shutil.rmtree(folder / _BUILD, ignore_errors=True)
            _warn_of_short_streams(config)
            return
    what = changed_setting(old, config)
    if what is None and old["format"] != FORMAT:
        what = f"file format {old['format']}, this version writes {FORMAT}"
    elif what is None and other_names:
        what = f"data.tokenizer.path: {other_names}"
    elif what is None:
        given = config.data.tokenizer
        kept = not given.path or load_tokenizer(given.path, given.eos_token).sha256 == old["tokenizer_sha256"]
        what = f"the {'text of data.sources' if kept else 'tokenizer in data.tokenizer.path'} has changed"
    raise UserError(
        f"data.dir={config.data.dir}: holds token files made with other settings ({what}); "
        "choose another data.dir, or replace them with: titans prepare CONFIG --force"
    )


def summary(manifest: dict, folder: Path, seconds: float) -> str:
    """Summary for the reader: documents, tokens, what was left out, the time, and the folder."""
    shown = one_line(str(folder))
    lines = [f"{shown}: prepared in {seconds:,.0f} s"]
    lines += [
        f"  {split}: {count['documents']:,} documents, {count['tokens']:,} tokens"
        for split, count in manifest["splits"].items()
    ]
    left_out = ", ".join(f"{number:,} {kind.replace('_', '-')}" for kind, number in manifest["dropped"].items())
    lines += [f"  left out: {left_out}" + (f" ({shown}/{REJECTED})" if manifest["dropped"]["rejected"] else "")]
    if letters := manifest.get("letters"):
        shown = ", ".join(f"{count:,} {letter}" for letter, count in letters.items())
        lines += [f"  letters other than A, C, G, T, all read as N: {shown}"]
    if count := manifest["ignored"]["count"]:
        names = files.abridged(manifest["ignored"]["files"], count)
        lines += [f"  not read, being hidden or of another suffix: {count:,} ({names})"]
    if floor := manifest.get("markov"):
        lines += [f"  floor: {floor['loss']:.4f} nats a base, by a Markov chain of order {floor['order']}"]
    if losses := _losses(manifest):
        lines.append(
            f"  WARNING: {losses}; set data.tokenizer.path to another tokenizer, or "
            "data.tokenizer.lossy=refuse to stop at such a document"
        )
    return "\n".join(lines)


def _losses(manifest: dict) -> str:
    """Message on texts that the tokenizer does not give back; empty if it loses nothing."""
    trip, lost = manifest.get("round_trip", {"tried": 0, "equal": 0}), ", ".join(manifest.get("lost_kinds", []))
    if changed := trip["tried"] - trip["equal"]:
        return (
            f"the tokenizer is lossy: {changed:,} of {trip['tried']:,} documents do not come back from their "
            f"tokens as they were (it loses {lost or 'rare characters'})"
        )
    return f"the tokenizer loses {lost}, of which no document here has any" if lost else ""


def _check_lossy(manifest: dict, config: Config) -> None:
    """
    Raises:
        UserError: data.tokenizer.lossy=refuse, and a lossy tokenizer made these token files.
    """
    if config.data.tokenizer.lossy == "refuse" and (losses := _losses(manifest)):
        raise UserError(
            f"data.tokenizer.lossy: given 'refuse', but {losses}; set data.tokenizer.path to another "
            "tokenizer, or data.tokenizer.lossy=warn"
        )


def _check_rejected(manifest: dict, config: Config, folder: Path) -> None:
    """
    Raises:
        UserError: data.bad_input=refuse, but these token files were made with data.bad_input=skip and lack some input;
            or the list of rejected input is damaged.
    """
    if config.data.bad_input == "refuse" and manifest.get("dropped", {}).get("rejected"):
        refuse_damage(folder, damage(folder, manifest, [REJECTED]))
        with open(folder / REJECTED, encoding="utf-8") as listed:
            first = Rejected(**json.loads(listed.readline()))
        raise UserError(
            f"data.bad_input: given 'refuse', but {one_line(str(folder))} was prepared without {first} and run "
            "titans prepare CONFIG --force, or set data.bad_input=skip"
        )


def _fingerprints(config: Config, cached: bool = False, settings: dict | None = None) -> tuple[str, str]:
    """Hashes (hex) of settings and sources, with the files' modification times and without them.

    Args:
        settings: replace those of ``config``.

    Raises as :func:`titans_pt.data_pipeline.sources.fingerprint`, and UserError for a tokenizer that does not fit
    model.vocab_size.
    """
    given, size, sha256 = config.data.tokenizer, config.model.vocab_size, None
    if not given.trained:
        tokenizer = NucleotideTokenizer(Path()) if given.path is None else load_tokenizer(given.path, given.eos_token)
        if given.kind == "nucleotides" and tokenizer.vocab_size > size:
            raise UserError(
                f"model.vocab_size: given {size}, but data.tokenizer.kind=nucleotides has {tokenizer.vocab_size} "
                f"entries: set model.vocab_size={tokenizer.vocab_size}"
            )
        if tokenizer.vocab_size > size:
            raise UserError(
                f"model.vocab_size: given {size}, but the tokenizer {given.path} has "
                f"{tokenizer.vocab_size} entries: set model.vocab_size={tokenizer.vocab_size} or more, or "
                "another data.tokenizer.path"
            )
        size, sha256 = tokenizer.vocab_size, tokenizer.sha256  # spare entries do not change the tokens
    parts = [FORMAT, sources.PART_BYTES, settings or content_settings(config.data, size), sha256]
    both = []
    for times in (True, False):
        found = [sources.fingerprint(source, cached, times) for source in config.data.every_source]
        both.append(hashlib.sha256(json.dumps(parts + found, sort_keys=True).encode()).hexdigest())
    return both[0], both[1]


def _names(data: DataConfig, saved: Path | None = None) -> tuple[str, str]:
    """Pieces that begin and end a document, and the template of chats if there are chats. Both are "" unless the
    tokenizer is a tokenizer.json, or its copy ``saved``: files next to it hold them, which its checksum does not cover.
    """
    given = data.tokenizer
    if given.path is None or not given.path.endswith(".json"):
        return "", ""
    tokenizer = load_tokenizer(saved or given.path, given.eos_token, given.add_bos)
    ends = " and ".join(repr(tokenizer.names[i]) for i in (*tokenizer.begin, tokenizer.eos_id))
    chats = any(source.format == "messages" for source in data.every_source)
    return ends, (tokenizer.chat_template or "") if chats else ""


def _other_names(data: DataConfig, saved: Path) -> str:
    """How :func:`_names` differ from those with which token files were made; empty if they do not."""
    (ends, template), (old_ends, old_template) = _names(data), _names(data, saved)
    if ends != old_ends:
        return f"documents begin or end with {old_ends}, now {ends}"
    return "its chat template has changed" if template != old_template else ""


def _only_touched(manifest: dict, config: Config, text: str) -> bool:
    """Whether only modification times of the sources have changed. Reads all sources if no size has changed.

    Args:
        text: current fingerprint without times.
    """
    if "source_sha256" not in manifest or manifest.get("text") != text:
        return False
    print(
        "titans prepare: files of data.sources have other modification times than before; comparing their content",
        file=sys.stderr,
    )
    hashes = []
    for source in config.data.every_source:
        for part in sources.parts([source]):
            read = hashlib.sha256()
            sources.hash_content(source, part, read.update)
            hashes.append(read.hexdigest())
    return hash_parts(hashes) == manifest["source_sha256"]


def _warn_of_short_streams(config: Config) -> None:
    if config.data.marks_answers:  # task=sft packs whole documents, of any number
        return
    for message in TokenFiles.open(config).shortages(config):
        print(f"titans prepare: warning: {one_line(message)}; titans train will refuse it", file=sys.stderr)


# --- building, in a separate folder ---


def _build(config: Config, build: Path, fingerprints: dict, shard: tuple[int, int] | None, workers: int) -> dict | None:
    """Writes parts to ``build``, and without ``shard`` the future content of data.dir to build/merged."""
    data = config.data
    tokenizer = _tokenizer(config, build)
    parts = sources.parts(data.every_source)
    job = Job(data, tokenizer.path, build)
    own = range(len(parts)) if shard is None else range(shard[0], len(parts), shard[1])
    if data.bad_input == "refuse":  # parts may have been written before, with skip
        for summary in filter(None, (read_summary(build, index) for index in own)):
            for rejected in summary["rejected"]:
                sources.refuse(Rejected(**rejected))
    write_parts(job, {index: parts[index] for index in own}, workers)
    if shard is not None:
        print(
            f"titans prepare: shard {shard[0]} of {shard[1]}: its {len(own)} of {len(parts)} parts are complete; "
            "when all shards are, run the same command without --shard",
            file=sys.stderr,
        )
        return None
    out = build / "merged"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    names = streams(data)
    before = ["validation"] * len(data.validation_sources)
    merged = merge(parts, build, out, tokenizer.vocab_size, [*before, *names], schema(data), data.near_duplicates)
    for split in SPLITS:
        if not merged["splits"][split]["documents"]:
            total = sum(count["documents"] for count in merged["splits"].values())
            if data.validation_sources:
                given = "sources" if split == "train" else "validation_sources"
                raise UserError(
                    f"data.{given}: none of its documents is left for the {split} split, of {total} that "
                    "are neither empty nor duplicates; add text"
                )
            raise UserError(
                f"data.validation_fraction={data.validation_fraction}: of {total} documents none "
                f"fell to the {split} split; add text in data.sources"
                + (", or raise the fraction (below 0.5)" if split == "validation" else "")
            )
    tokenizer.save(out)
    hashes = [file["sha256"] for file in merged["files"].values()] + [tokenizer.sha256]
    manifest = {
        "format": FORMAT,
        "content": hashlib.sha256("".join(hashes).encode()).hexdigest(),
        "settings": content_settings(data, tokenizer.vocab_size),
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "streams": list(dict.fromkeys(names)),
        "ignored": _ignored(data),
        **merged,
        "lost_kinds": lost_kinds(tokenizer),
        "files": merged["files"]
        | {path.name: describe(path) for path in sorted(out.iterdir()) if path.name not in merged["files"]},
        **fingerprints,
    }
    if tokenizer.complement is not None and (floor := _floor(out, list(dict.fromkeys(names)), tokenizer)):
        manifest["markov"] = floor.as_dict()
    _check_lossy(manifest, config)  # parts may have been written before lossy=refuse was set
    write_json(out / MANIFEST, seal(manifest))
    return manifest


def _floor(out: Path, names: list[str], tokenizer: Tokenizer) -> Floor | None:
    """Validation loss of Markov chains counted on the training streams, of which only the first bases are read."""

    def read(name: str, most: int) -> np.ndarray:
        dataset = IndexedDataset(out / name, tokenizer.vocab_size)
        return np.asarray(dataset.read(0, min(dataset.tokens, most)), np.uint8)

    train = np.concatenate([read(name, _COUNTED // len(names)) for name in names])
    return markov_floor(train, read("validation", _COUNTED // 8))


def _ignored(data: DataConfig) -> dict:
    """The manifest's entry on files under the sources that are not read: how many, and the first names."""
    names = [
        utf8(os.path.join(source.location, name))
        for source in data.every_source
        for name in of_source(source).listing().ignored
    ]
    return {"count": len(names), "files": names[:_NAMED]}


def _tokenizer(config: Config, build: Path) -> Tokenizer:
    """The tokenizer in ``build``: a copy of the one that is given, or trained on the training split."""
    given = config.data.tokenizer
    if given.trained and not all(of_source(source).has_text for source in config.data.every_source):
        raise UserError(
            "data.sources: kind=indexed holds ids, not text; set data.tokenizer.path to the tokenizer that made them"
        )
    path = saved_tokenizer(build)
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=build) as scratch:  # several nodes may do this: each makes the same file
            if given.kind == "nucleotides":
                NucleotideTokenizer(Path()).save(Path(scratch))
                path = build / FILES[1]
            elif given.path is None:
                size, characters, symbols = config.model.vocab_size, given.train_characters, given.user_defined_symbols
                train_tokenizer(_sample(config.data), Path(scratch) / path.name, size, characters, symbols)
            else:
                path = build / load_tokenizer(given.path, given.eos_token, given.add_bos).save(Path(scratch)).name
            for file in sorted(Path(scratch).iterdir(), key=lambda file: file.name == path.name):
                os.replace(file, build / file.name)
    tokenizer = load_tokenizer(path, given.eos_token, given.add_bos)
    if given.lossy == "refuse" and (lost := lost_kinds(tokenizer)):
        raise UserError(
            f"data.tokenizer.lossy: given 'refuse', but {given.path} loses {', '.join(lost)}; set "
            "data.tokenizer.path to another tokenizer, or data.tokenizer.lossy=warn"
        )
    alone = len(tokenizer.encode("."))  # a symbol stands behind it: a text may begin with an added space
    for symbol in given.user_defined_symbols if given.path else ():
        if len(tokenizer.encode("." + symbol)) != alone + 1:
            raise UserError(
                f"data.tokenizer.user_defined_symbols: given {symbol!r}, but {given.path} splits it, and only a "
                "tokenizer that is trained here gets symbols; leave out data.tokenizer.path, or set "
                "data.tokenizer.user_defined_symbols=[]"
            )
    return tokenizer


def _sample(data: DataConfig) -> Iterator[str]:
    """Texts of the training split to train a tokenizer on: one document of each source in turn, no duplicates."""
    reject = sources.refuse if data.bad_input == "refuse" else lambda rejected: None  # counted when its part is read
    known: set[bytes] = set()  # hashes of documents read until the tokenizer has enough
    for document in _in_turn([sources.documents(source, reject=reject) for source in data.sources]):
        digest = document_hash(document.text)
        if digest not in known and not held_out(digest, validation_fraction(data)):
            yield document.text
        known.add(digest)


def _in_turn(streams: list[Iterator[Document]]) -> Iterator[Document]:
    while streams:
        going = []
        for stream in streams:
            for document in stream:
                yield document
                going.append(stream)
                break
        streams = going


# --- files ---


def _check_apart(config: Config, folder: Path) -> None:
    """
    Raises:
        UserError: data.dir is in a source's folder: a call would replace files there, and read its own.
    """
    here = folder.resolve()
    for section in ("sources", "validation_sources"):
        for n, source in enumerate(getattr(config.data, section)):
            if of_source(source).contains(here):
                raise UserError(
                    f"data.dir: given {folder}, which is in data.{section}.{n}.path={source.path}: titans prepare "
                    "would replace files there, and read its own; choose another data.dir"
                )


def _check_own(folder: Path) -> None:
    """
    Raises:
        UserError: the folder has files that would be replaced, but no call of ours has written there or begun to.
    """
    if (folder / MANIFEST).exists() or (folder / _BUILD).exists() or not folder.is_dir():
        return
    theirs = sorted(path.name for path in folder.iterdir() if _OURS.fullmatch(path.name))
    if theirs:
        raise UserError(
            f"data.dir={folder}: holds {theirs[0]}{f' and {len(theirs) - 1} more' if len(theirs) > 1 else ''}, which "
            f"would be replaced, but no {MANIFEST} of titans prepare; choose another data.dir, or give --force"
        )


def _keep_finished(build: Path) -> None:
    """Removes what a second call could not use; all of ``build`` if no part in it is complete."""
    shutil.rmtree(build / "merged", ignore_errors=True)
    if not any(build.glob("part-*.json")):
        shutil.rmtree(build, ignore_errors=True)
        with contextlib.suppress(OSError):
            build.parent.rmdir()  # unless work with other settings was also begun


def _move(merged: Path, folder: Path) -> None:
    """Moves all files into place. Without its manifest, a folder that is half moved counts as empty."""
    _remove(folder / MANIFEST)
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            _remove(path)  # of another set of streams, or another kind of tokenizer
    for path in sorted(merged.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
        os.replace(path, folder / path.name)


def _remove(path: Path) -> None:
    """Removes a file, or a folder of that name, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
