"""A labelled set in data.dir: sequences.npz, and its manifest set.json, which is written last."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from titans_pt.errors import UserError
from titans_pt.genomics.alphabet import LETTERS, encoded
from titans_pt.genomics.baselines import baselines, distinct
from titans_pt.genomics.sets import SPLITS, LabelledSet, Split
from titans_pt.tools.files import unreadable, write_atomically, write_text
from titans_pt.tools.sealed import read_sealed, seal

FORMAT = 1
MANIFEST, SEQUENCES = "set.json", "sequences.npz"
_REMEDY = "make it again with: titans prepare CONFIG --force"


@dataclass(frozen=True)
class PreparedSet:
    """A labelled set and its manifest.

    given: the sequences.
    manifest: classes, counts, baselines, settings, sources.
    sha256: hash of the sequences.
    """

    given: LabelledSet
    manifest: dict[str, Any]

    @property
    def sha256(self) -> str:
        return self.manifest["sha256"]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the set.json of a folder; None if there is none.

    Raises:
        UserError: it is damaged, or of another version.
        OSError: the disk failed, one of DISK_FAILED.
    """
    path = folder / MANIFEST
    found = read_sealed(path, _REMEDY)
    if found is not None and found.get("format") != FORMAT:
        raise UserError(f"{path}: of format {found.get('format')}, this version reads {FORMAT}; {_REMEDY}")
    return found


def write(folder: Path, given: LabelledSet, middle: int, settings: dict, state: list) -> dict[str, Any]:
    """Write a set with its baselines and return its manifest.

    Args:
        settings: settings that the set was made with.
        state: state of its sources, see titans_pt.genomics.sets.state_of.
    """
    arrays = _arrays(given)
    manifest = {
        "format": FORMAT, "sha256": _checksum(given.classes, arrays), "classes": list(given.classes),
        "counts": {name: np.bincount(getattr(given, name).labels, minlength=len(given.classes)).tolist()
                   for name in SPLITS},
        "lengths": {name: [int(f(arrays[f"{name}_lengths"])) for f in (np.min, np.median, np.max)] for name in SPLITS},
        "copies": int((~distinct(given)).sum()), "middle": middle, "letters": given.letters,
        "baselines": baselines(given, middle), "settings": settings, "state": state,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    write_atomically(folder / SEQUENCES, lambda path: path.write_bytes(packed.getvalue()))
    write_manifest(folder, manifest)
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]):
    write_text(folder / MANIFEST, json.dumps(seal(manifest), indent=1) + "\n")


def content_hash(given: LabelledSet) -> str:
    """SHA-256 (hex) of a set's classes, sequences and labels, as its manifest has it."""
    return _checksum(given.classes, _arrays(given))


def _arrays(given: LabelledSet) -> dict[str, np.ndarray]:
    arrays = {}
    for name in SPLITS:
        split: Split = getattr(given, name)
        arrays[f"{name}_ids"] = encoded(b"".join(split.sequences))
        arrays[f"{name}_lengths"] = np.array([len(sequence) for sequence in split.sequences], np.int32)
        arrays[f"{name}_labels"] = split.labels.astype(np.int16)
    return arrays


def _checksum(classes: Sequence[str], arrays: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256(json.dumps(list(classes)).encode())
    for name in sorted(arrays):
        found.update(arrays[name].tobytes())
    return found.hexdigest()


def read(folder: Path) -> PreparedSet:
    """Read the set in a folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"data.dir={folder}: holds no labelled sequences; run: titans prepare CONFIG, with the same "
                        "config")  # fmt: skip
    try:
        with np.load(folder / SEQUENCES, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if _checksum(manifest["classes"], arrays) != manifest["sha256"]:
            raise ValueError(f"other sequences than {MANIFEST} says")
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        path = folder / SEQUENCES
        raise UserError(f"{path}: damaged ({unreadable(path, error)}); {_REMEDY}") from None
    letters = np.zeros(256, np.uint8)
    letters[encoded(LETTERS)] = np.frombuffer(LETTERS, np.uint8)
    splits = {}
    for name in SPLITS:
        ends = np.cumsum(arrays[f"{name}_lengths"]).tolist()
        joined = letters[arrays[f"{name}_ids"]].tobytes()
        sequences = [joined[start:end] for start, end in pairwise([0, *ends])]
        splits[name] = Split(sequences, arrays[f"{name}_labels"].astype(np.int64))
    return PreparedSet(LabelledSet(tuple(manifest["classes"]), letters=manifest["letters"], **splits), manifest)


def told(manifest: dict[str, Any], folder: Path) -> str:
    """Description of a set and of its baselines, for the reader."""
    lines = [f"{folder}: {len(manifest['classes'])} classes ({', '.join(manifest['classes'])})"]
    for name, counts in manifest["counts"].items():
        least, usual, most = manifest["lengths"][name]
        each = ", ".join(f"{n:,}" for n in counts)
        lines.append(f"  {name}: {sum(counts):,} sequences ({each}) of {least} to {most} bases, "
                     f"half of them up to {usual}")  # fmt: skip
    if letters := manifest["letters"]:
        lines.append("  letters other than A, C, G, T, N, all read as N: "
                     + ", ".join(f"{count:,} {letter}" for letter, count in letters.items()))  # fmt: skip
    lines.append(f"  test sequences that are copies of training ones: {manifest['copies']:,}")
    return "\n".join([*lines, *baseline_table(manifest)])


def baseline_table(manifest: dict[str, Any]) -> list[str]:
    """Lines of a table: each baseline's accuracy in percent, by column."""
    found = manifest["baselines"]
    names = list(next(iter(found.values())))
    shown = {"test": "test", "distinct": "without copies", "middle": f"middle {manifest['middle']}"}
    lines = [f"  {'accuracy (%)':<20}" + "".join(f"{shown[name]:>16}" for name in names)]
    return lines + [f"  {baseline:<20}" + "".join(f"{100 * by[name]['accuracy']:>16.1f}" for name in names)
                    for baseline, by in found.items()]  # fmt: skip
