"""Files of tensors, and what identifies a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path):
    """Writes fp32 tensors as safetensors (its format: length of the header, header as JSON, the numbers).

    The library's save_file holds Python's lock until the disk is done, so training would pause; these writes do not.
    Tensors must be on the CPU and contiguous.

    Raises:
        OSError: names the file.
    """
    header, offset = {}, 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in header:
                file.write(tensors[name].numpy().data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # a failed write does not say where


def describe(path: Path) -> dict[str, Any]:
    """{"bytes": its size, "sha256": of its content, hex}."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
