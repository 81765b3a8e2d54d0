"""States (titans_pt.layers.state) as files."""

import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from titans_pt.errors import UserError
from titans_pt.layers.state import moved, parts
from titans_pt.models.mixers import MIXERS
from titans_pt.tools.files import write_atomically
from titans_pt.tools.tensor_files import open_tensors

FORMAT = "titans-state-2"
READABLE = ("titans-state-1", FORMAT)
"""Formats that this version reads; format 1 has no checksum."""
_BLANK = "0" * 64
"""Placeholder for the checksum while the whole file's checksum is computed."""
_READ = 1 << 24
_REMEDY = "copy it again, or write it again with: titans generate RUN --save-state FILE"
_PACKAGE = "titans_pt"
_BEFORE = "kernels."
"""Module prefix of the memory's states in files of version 0.1.0; newer files have titans_pt.kernels."""


def save_state(state: Any, path: str | Path, about: dict[str, str] | None = None):
    """Writes a state (of any mixer) as one safetensors file. An old file at ``path`` is replaced whole or not at all.

    Tensors are named by their place (``blocks.0.memory.weights.1``). The metadata has ``format``, ``about``,
    ``structure`` (the nesting of dataclasses, lists, tuples, dicts and plain values, as JSON) and ``sha256`` (hex), the
    hash of the file with zeros in place of the hash.

    Args:
        about: strings to store with the state, such as the hash of the model that it belongs to.

    Raises:
        TypeError: the state holds something other than tensors, dataclasses of ours or of a mixer's package, lists,
            tuples, dicts with strings as keys, None, bool, int, float, str.
        OSError: the disk is full, or the folder cannot be written to.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_flatten(state, "", tensors))
    metadata = {"format": FORMAT, "structure": structure, "about": json.dumps(about or {}), "sha256": _BLANK}
    content = save(tensors, metadata)
    content = content.replace(_entry(_BLANK), _entry(hashlib.sha256(content).hexdigest()), 1)
    write_atomically(Path(path), lambda temporary: temporary.write_bytes(content), durable=True)


def load_state(path: str | Path, device: str | torch.device = "cpu") -> Any:
    """Loads a state that :func:`save_state` wrote, bit for bit.

    Floating-point tensors are moved to ``device``. Integer tensors (offsets, places) stay on the host, where the mixers
    build masks and cuts from them.

    Raises:
        UserError: no such file, not a state, a damaged one, or one with a format or class that this version does not
            have.
    """
    file, metadata = _open(path)
    with _sound(path, metadata):
        return _build(json.loads(metadata["structure"]), file, torch.device(device), Path(path))


def read_about(path: str | Path) -> dict[str, str]:
    """The ``about`` of a state file. Raises UserError like :func:`load_state`."""
    _, metadata = _open(path)
    with _sound(path, metadata):
        return dict(json.loads(metadata["about"]))


def _open(path: str | Path) -> tuple[Any, dict[str, str]]:
    """The open safetensors file of a state, and its metadata.

    Raises:
        UserError: it is anything else.
        OSError: it cannot be opened.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such state file; write one with: titans generate RUN --save-state FILE")
    try:
        file = open_tensors(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a state file, or a damaged one ({error}); {_REMEDY}") from None
    metadata = file.metadata() or {}
    if metadata.get("format") not in READABLE:
        raise UserError(
            f"{path}: format {metadata.get('format')!r}, this version reads {', '.join(READABLE)}; {_REMEDY}"
        )
    given = metadata.get("sha256")
    if given != (_checksum(path, given) if given else None) or not given and metadata["format"] == FORMAT:
        raise UserError(f"{path}: damaged: its content does not have the checksum that it was written with; {_REMEDY}")
    return file, metadata


def _entry(checksum: str) -> bytes:
    """The checksum's entry in the header. It is unique: quotes inside other entries have a backslash."""
    return f'"sha256":"{checksum}"'.encode()


def _checksum(path: Path, given: str) -> str:
    """SHA-256 (hex) of a file before the checksum ``given`` was inserted."""
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
        found = hashlib.sha256(size + header.replace(_entry(given), _entry(_BLANK), 1))
        while part := file.read(_READ):
            found.update(part)
    return found.hexdigest()


@contextlib.contextmanager
def _sound(path: str | Path, metadata: dict[str, str]) -> Iterator[None]:
    """Turns errors inside the ``with`` into a UserError if the file has no checksum: it is then damaged.

    Raises:
        UserError: a file without a checksum is damaged.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        if "sha256" in metadata:
            raise
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); {_REMEDY}") from None


def _flatten(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict:
    """The JSON form of ``value``, with one key for its kind; its tensors are added to ``tensors``, named by place."""
    if isinstance(value, torch.Tensor):
        # Copy, because the file format has no expanded or shared tensors.
        if name in tensors:  # possible if a key has a dot
            raise TypeError(f"{name}: two tensors have this name, and cannot be saved")
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if is_dataclass(value):
        kind = type(value)
        if not _ours(kind.__module__):
            raise TypeError(f"{kind.__module__}.{kind.__qualname__}: not a class of {_PACKAGE} or of a mixer's package")
        inner = {key: _flatten(part, _join(name, key), tensors) for key, part in parts(value)}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": inner}
    if type(value) in (list, tuple):
        items = [_flatten(part, _join(name, key), tensors) for key, part in parts(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _flatten(part, _join(name, key), tensors) for key, part in parts(value)}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(f"{name or 'state'}: {type(value).__qualname__} cannot be saved")


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _build(form: dict, file: Any, device: torch.device, path: Path) -> Any:
    """The inverse of :func:`_flatten`."""
    match form:
        case {"tensor": name}:
            return moved(file.get_tensor(name), device)
        case {"class": name, "fields": inner}:
            kind = _class(name, path)
            known = {f.name for f in fields(kind)}
            needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
            if not needed <= set(inner) <= known:  # newer fields have defaults with the earlier behaviour
                raise UserError(f"{path}: {name} has other fields in this version; write the state again")
            return kind(**{key: _build(item, file, device, path) for key, item in inner.items()})
        case {"list": items}:
            return [_build(item, file, device, path) for item in items]
        case {"tuple": items}:
            return tuple(_build(item, file, device, path) for item in items)
        case {"dict": items}:
            return {key: _build(item, file, device, path) for key, item in items.items()}
        case {"value": value}:
            return value
    raise UserError(f"{path}: its structure has {sorted(form)}, which this version does not know; write it again")


def _ours(module: str) -> bool:
    """Whether a module may define states.

    Allowed are modules of this package, of a package that defines a mixer, and files next to a file that defines one.
    """
    package = module.partition(".")[0]
    if package in {_PACKAGE, *(mixer.__module__.partition(".")[0] for mixer in MIXERS)}:
        return True
    folder = _folder(module) if package == module else None
    return folder is not None and folder in {_folder(m.__module__) for m in MIXERS if "." not in m.__module__}


def _folder(module: str) -> Path | None:
    """Folder of a module's file; None if it is not loaded or has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).resolve().parent if file else None


def _class(name: str, path: Path) -> type:
    """A dataclass of ours by "module:name". A file may name nothing else, because it could come from anywhere."""
    module, _, kind = name.partition(":")
    if module.startswith(_BEFORE):
        module = f"{_PACKAGE}.{module}"
    found = None
    if _ours(module):
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), kind, None)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise UserError(f"{path}: holds a {name}, which this version does not have; write the state again with it")
    return found
