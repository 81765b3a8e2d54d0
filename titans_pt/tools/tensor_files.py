"""Files of tensors, and checksums of files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_pt.errors import UserError
from titans_pt.tools.files import naming

if TYPE_CHECKING:
    from torch import Tensor

SUMS = "SHA256SUMS"
"""File with a folder's checksums, in the format of ``sha256sum --check``."""
_CHECKED = (".safetensors", ".json", ".model")
"""Ends of the names of files that are compared with SUMS."""


def save_tensors(tensors: dict[str, Tensor], path: Path):
    """Writes fp32 tensors in the safetensors format: length of the header, header as JSON, numbers.

    The library's save_file holds Python's lock until the disk is done, which would pause training. These writes do not
    hold the lock. Tensors must be on the CPU and contiguous.

    Raises:
        OSError: the disk is full, for example; the error names the file.
    """
    header, offset = {}, 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            file.write(tensors[name].numpy().data)


def open_tensors(path: Path) -> Any:
    """A safetensors file, for ``with``; its tensors come on the CPU.

    Raises:
        OSError: it cannot be opened. The library alone says "No such file" whatever the reason, such as too many
            open files.
    """
    from safetensors import safe_open

    with path.open("rb"):
        return safe_open(path, framework="pt", device="cpu")


def describe(path: Path) -> dict[str, Any]:
    """{"bytes": size of the file, "sha256": hash of its content, hex}."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Writes the file SUMS with checksums of all files in ``folder``."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Compares weights, settings and tokenizer with SUMS, if the folder has it; earlier versions wrote none.

    Raises:
        UserError: a file does not match its checksum in SUMS.
    """
    path = folder / SUMS
    if not path.exists():
        return
    remedy = f"copy or export it again, or delete {path} if the change is wanted"
    try:
        listed = dict(line.split("  ", 1)[::-1] for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from None
    for file in sorted(folder.iterdir()):
        if file.suffix in _CHECKED and file.name in listed and sha256(file) != listed[file.name]:
            raise UserError(f"{file}: not the file that {SUMS} names: damaged, or changed since; {remedy}")
