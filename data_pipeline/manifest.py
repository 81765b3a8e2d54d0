"""manifest.json of a folder of token files: what they were made with, and whether a config can still use them."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titans_pt.config import Config, DataConfig, SourceConfig
from titans_pt.data_pipeline.indexed import REMEDY
from titans_pt.data_pipeline.text import utf8
from titans_pt.errors import UserError
from titans_pt.tools.files import unreadable
from titans_pt.tools.sealed import read_sealed
from titans_pt.tools.tensor_files import sha256

MANIFEST = "manifest.json"
FORMAT = 2
READABLE = (1, 2)
"""Formats whose token files can be trained on; 1 has no list of documents."""
_NEEDED = ("settings", "content", "tokenizer_sha256", "vocab_size", "splits")
"""Entries that the manifests of all these formats have."""
_NEWER = ("data.near_duplicates", "data.validation_sources")
"""Settings that a manifest has only if they are given, as in manifests from before these settings existed."""


def read_manifest(folder: Path) -> dict | None:
    """manifest.json of a folder; None where there is none.

    Raises:
        UserError: it is damaged.
        OSError: the disk failed, one of DISK_FAILED.
    """
    path = folder / MANIFEST
    manifest = read_sealed(path, REMEDY)
    if manifest and manifest.get("format") in READABLE and (lost := [key for key in _NEEDED if not manifest.get(key)]):
        raise UserError(f"{path}: damaged ({lost[0]!r} is missing); {REMEDY}")
    return manifest


def damage(folder: Path, manifest: dict, names: Iterable[str] | None = None, read: bool = True) -> dict[str, str]:
    """Problems of the files that a manifest lists: {name: problem}, empty where every byte is as written.

    Args:
        names: the files to check; None: all listed files. Files that the manifest does not list are not read.
        read: False compares sizes alone.
    """
    found, listed = {}, manifest.get("files", {})
    for name in listed if names is None else [name for name in names if name in listed]:
        written = listed[name]
        try:
            if (folder / name).is_dir():
                found[name] = "is a folder, and a file of this name was written"
            elif (size := (folder / name).stat().st_size) != written["bytes"]:
                found[name] = f"{size:,} bytes, written with {written['bytes']:,}"
            elif read and sha256(folder / name) != written["sha256"]:
                found[name] = "its checksum is not that of the manifest"
        except OSError as error:
            found[name] = unreadable(folder / name, error)
    return found


def refuse_damage(folder: Path, found: dict[str, str]) -> None:
    """Refuses damaged files.

    Raises:
        UserError: ``found``, from :func:`damage` in ``folder``, is not empty; names the files.
    """
    if found:
        name, problem = next(iter(found.items()))
        more = f" ({len(found)} files are damaged: {', '.join(found)})" if len(found) > 1 else ""
        raise UserError(f"{folder / name}: {problem}{more}; {REMEDY}")


def unreadable_format(manifest: dict) -> str | None:
    """The format of token files that this version cannot read; None if it can."""
    found = manifest.get("format")
    return None if found in READABLE else f"file format {found}, this version writes {FORMAT}"


def changed_setting(manifest: dict, config: Config) -> str | None:
    """The first setting in which token files and ``config`` differ, with both values; None if there is none."""
    if what := unreadable_format(manifest):
        return what
    made = dict(manifest["settings"])
    with contextlib.suppress(ValidationError):  # settings newer than the manifest take their defaults
        keys = ("sources", "tokenizer", "validation_fraction", "near_duplicates", "validation_sources")
        old = DataConfig.model_validate({key: made[f"data.{key}"] for key in keys if f"data.{key}" in made})
        made = content_settings(old, made["model.vocab_size"]) | {"mixture": made.get("mixture", False)}
    size = config.model.vocab_size
    if not config.data.tokenizer.trained:  # the model may have room for more than the tokenizer's entries
        size = min(size, manifest["vocab_size"])
    today = content_settings(config.data, size)
    for name in dict.fromkeys([*today, *_NEWER]):
        then, now = made.get(name), today.get(name)
        if not _equal(then, now):
            return f"{name}: made with {json.dumps(then)}, config has {json.dumps(now)}"
    return None


def _equal(then: Any, now: Any, path: bool = False) -> bool:
    """Whether two settings are equal; paths may be spelled differently."""
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(_equal, then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        local = now.get("kind") != "hub"
        return then.keys() == now.keys() and all(_equal(then[key], now[key], local and key == "path") for key in now)
    return then == now or (path and None not in (then, now) and _one_file(then, now))


def _one_file(then: str, now: str) -> bool:
    """Whether two paths may be one file: ``./a``, ``a`` and ``/b/a`` may, as the folder of ``a`` is not recorded."""
    if os.path.abspath(then) == os.path.abspath(now):
        return True
    short, long = sorted((Path(os.path.normpath(path)) for path in (then, now)), key=Path.is_absolute)
    return long.is_absolute() and not short.is_absolute() and long.parts[-len(short.parts) :] == short.parts


def streams(data: DataConfig) -> list[str]:
    """Name the training stream that each of data.sources goes to: one for all, unless they have weights."""
    weighted = data.sources[0].weight is not None
    return [f"train-{i}" if weighted else "train" for i in range(len(data.sources))]


def content_settings(data: DataConfig, vocab_size: int) -> dict:
    """Settings that determine the content of token files, by path. Weights may change without preparing again.

    vocab_size: number of the tokenizer's entries.
    """
    newer = [data.near_duplicates, [_source(source) for source in data.validation_sources]]
    return _clean(
        {
            "model.vocab_size": vocab_size,
            "data.sources": [_source(source) for source in data.sources],
            "data.tokenizer": data.tokenizer.model_dump(mode="json", exclude={"lossy"}, exclude_defaults=True),
            "data.validation_fraction": data.validation_fraction,
            "mixture": data.sources[0].weight is not None,
            **{name: value for name, value in zip(_NEWER, newer, strict=True) if value},
        }
    )


def _source(source: SourceConfig) -> dict:
    return source.model_dump(mode="json", exclude={"weight"}, exclude_defaults=True)


def _clean(tree: Any) -> Any:
    """``tree`` with all strings valid UTF-8, which a typed path may not be."""
    match tree:
        case dict():
            return {key: _clean(value) for key, value in tree.items()}
        case list():
            return [_clean(value) for value in tree]
    return utf8(tree) if isinstance(tree, str) else tree
