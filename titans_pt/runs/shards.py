"""Sharded tensors: every rank writes its pieces to its own file, and any number of ranks can read them.

    shard-00003.safetensors   pieces of rank 3: KIND.NAME, flat, fp32
    shard-00003.json          positions of the pieces, size and SHA-256 of the file above; written when it is complete
    tensors.json              NAME -> {shape of the whole tensor, dim it is cut along (or null), number of parts}

Tensor parallelism cuts a tensor into ``parts`` equal parts along ``dim``; zeros pad the last parts if the size does not
divide. ZeRO cuts each flattened part into pieces: a piece is [start, start + its length) of a part.
runs/checkpoints.py defines the values of KIND.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titans_pt.layers.sharding import filled
from titans_pt.tools.files import flush_to_disk, write_text
from titans_pt.tools.tensor_files import describe, open_tensors, save_tensors

INDEX = "tensors.json"


@dataclass(frozen=True)
class Whole:
    """A tensor's shape, and its cut into ``parts`` along ``dim``; dim None: not cut, parts is 1."""

    shape: tuple[int, ...]
    dim: int | None = None
    parts: int = 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], -(-self.shape[self.dim] // self.parts), *self.shape[self.dim + 1 :])

    def part(self, whole: Tensor, number: int) -> Tensor:
        """The ``number``-th part of a tensor of this shape."""
        if self.dim is None:
            return whole
        return filled(whole, self.dim, self.parts).chunk(self.parts, self.dim)[number]

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole tensor, joined from ``parts``."""
        return parts[0] if self.dim is None else torch.cat(parts, self.dim).narrow(self.dim, 0, self.shape[self.dim])


def shard_file(number: int, suffix: str = "safetensors") -> str:
    return f"shard-{number:05d}.{suffix}"


def write_shard(folder: Path, number: int, pieces: dict[str, Tensor], places: dict[str, tuple[int, int]]):
    """Writes one rank's file.

    Args:
        pieces: KIND.NAME -> flat fp32 tensor on the CPU, contiguous.
        places: NAME -> (part, start) of its pieces, the same for every kind.

    Raises:
        OSError: disk full, folder not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / shard_file(number)
    save_tensors(pieces, path)
    flush_to_disk(path)
    write_text(folder / shard_file(number, "json"), json.dumps({"file": describe(path), "places": places}))


def join_shards(
    folder: Path, count: int, tensors: dict[str, Whole], stop: Callable[[], bool]
) -> dict[str, dict[str, Any]]:
    """Waits until the files of ``count`` ranks are complete, then writes the index.

    Returns:
        Size and SHA-256 of every file by name, as computed by the rank that wrote it; {} if ``stop()`` became true.
    """
    files: dict[str, dict[str, Any]] = {}
    for number in range(count):
        told = folder / shard_file(number, "json")
        while not told.is_file():
            if stop():
                return {}
            time.sleep(0.02)
        files |= {shard_file(number): json.loads(told.read_text())["file"], told.name: describe(told)}
    write_text(folder / INDEX, json.dumps({name: asdict(whole) for name, whole in tensors.items()}))
    return files | {INDEX: describe(folder / INDEX)}


class ShardReader:
    """Reads tensors from a folder of shards. Files are opened when needed; ``with`` closes them."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = json.loads((folder / INDEX).read_text())
        self.tensors = {name: Whole(tuple(w["shape"]), w["dim"], w["parts"]) for name, w in index.items()}
        self._places: dict[tuple[str, int], list[tuple[int, Path]]] = defaultdict(list)
        for told in sorted(folder.glob("shard-*.json")):
            for name, (part, start) in json.loads(told.read_text())["places"].items():
                self._places[name, part].append((start, told.with_suffix(".safetensors")))
        for places in self._places.values():
            places.sort()
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()

    def keys(self) -> set[str]:
        """KIND.NAME of every tensor that the shards have. All pieces of a tensor have the same kinds: one is read."""
        paths = {places[0][1] for places in self._places.values()}
        return {key for path in paths for key in self._open(path).keys()}  # noqa: SIM118

    def whole(self, kind: str, name: str) -> Tensor:
        """The whole tensor, fp32."""
        cut = self.tensors[name]
        size = torch.Size(cut.part_shape).numel()
        return cut.join([self.span(kind, name, part, 0, size).view(cut.part_shape) for part in range(cut.parts)])

    def span(self, kind: str, name: str, part: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flat part; nothing else is read.

        Raises:
            ValueError: the pieces leave a gap, which no complete checkpoint has.
        """
        found, filled = torch.empty(stop - start, dtype=torch.float32), 0
        places = self._places[name, part]
        ends = [begin for begin, _ in places[1:]] + [stop]
        for (begin, path), end in zip(places, ends, strict=True):
            if begin >= stop or end <= start:  # a thousand ranks would each open the files of all others
                continue
            piece = self._open(path).get_slice(f"{kind}.{name}")
            first, last = max(start, begin), min(stop, begin + piece.get_shape()[0])
            if first < last:
                found[first - start : last - start] = piece[first - begin : last - begin]
                filled += last - first
        if filled != stop - start:
            raise ValueError(f"{self.folder}: {kind}.{name} has {filled} of {stop - start} numbers")
        return found

    def _open(self, path: Path):
        if path not in self._files:
            self._files[path] = self._stack.enter_context(open_tensors(path))
        return self._files[path]
