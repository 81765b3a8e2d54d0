"""``titans inspect``: run a text through a trained model and record its memories at every token."""

from dataclasses import fields
from itertools import chain, count
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.data_pipeline import StreamDecoder
from titans_pt.errors import UserError
from titans_pt.inspection.inspection import Inspection
from titans_pt.inspection.picture import draw
from titans_pt.inspection.table import table
from titans_pt.layers.hierarchy import HierarchicalMemory
from titans_pt.layers.memory_observer import MemoryFigures, observe_memories
from titans_pt.runs.loaded import load_run
from titans_pt.streaming import best_device, device_of
from titans_pt.tools.files import check_room, read_text, write_atomically

PIECE = 512
"""Tokens read at once; this changes memory use and speed, not the figures."""


def inspect(
    run_dir: str | Path,
    text_file: str | Path,
    out: str | Path | None = None,
    max_tokens: int = 2048,
    step: int | None = None,
) -> Inspection:
    """Stream a text through a run's model; write NAME.npz and NAME.png, and print a table.

    NAME is the name of the text file with its suffix, as in page.md.png. A number is added if a text of the same name
    in another folder has been inspected. The files of the same text are replaced.

    Args:
        text_file: UTF-8; other bytes become U+FFFD. "-" is standard input.
        out: folder for the two files; None is RUN/inspection/step-XXXXXXXX.
        max_tokens: most tokens of the text that are read.
        step: the checkpoint; None is the newest.

    Raises:
        UserError: no such text, an empty text, a model without memory, or an error that ``load_run`` finds in the run.
    """
    if max_tokens < 2:
        raise UserError(f"max_tokens: given {max_tokens}; allowed: at least 2")
    if out is None and Path(run_dir).is_dir():  # load_run refuses all else
        check_room(Path(run_dir) / "inspection", "RUN; give --out DIR, a folder where you may write", folder=True)
    text = read_text(text_file, "--text", replace=True)
    run = load_run(run_dir, step=step, device=best_device())
    ids = run.tokenizer.document(text)[:max_tokens]
    if len(ids) < 2:
        found = len(ids) - len(run.tokenizer.begin)
        raise UserError(f"--text: {text_file}: {found} tokens; name a text of at least 2")
    result = read(run.model, torch.tensor(ids), _pieces(run.tokenizer, ids))

    folder = run.folder.path / "inspection" / f"step-{run.step:08d}" if out is None else Path(out)
    path = Path(text_file)
    name, source = ("standard-input", "-") if str(path) == "-" else (path.name, str(path.resolve()))
    arrays = _arrays_path(folder, name, source)
    picture = arrays.with_suffix(".png")
    write_atomically(arrays, lambda path: _write_arrays(result, source, path))
    title = f"{run.folder.path.resolve().name}, step {run.step}: what the memory finds surprising in {name}"
    draw(result, picture, title)
    print(table(result))
    print(f"\narrays: {arrays}\npicture: {picture}")
    return result


@torch.no_grad()
def read(model: nn.Module, ids: Tensor, pieces: list[str]) -> Inspection:
    """Inspect ids (T,), T >= 2, and their text ``pieces`` in a model in eval mode.

    Raises:
        UserError: the model has no memory.
    """
    device, state, last = device_of(model), None, None
    losses: list[Tensor] = []
    figures: dict[str, list[MemoryFigures]] = {}
    with observe_memories(model) as observers:
        if not observers and any(isinstance(module, HierarchicalMemory) for module in model.modules()):
            raise UserError(
                "model.memory.hierarchy: a hierarchy of memories cannot be inspected; name a run without one"
            )
        if not observers:
            raise UserError(
                "this model has no neural memory to look into; name a run with lmm, mac, mag or mal in model.mixers"
            )
        for piece in ids.split(PIECE):
            logits, state = model(piece.to(device)[None], state)
            before = logits[0] if last is None else torch.cat([last, logits[0]])
            targets = piece[1:] if last is None else piece
            losses.append(F.cross_entropy(before[: len(targets)].float(), targets.to(device), reduction="none").cpu())
            last = logits[0, -1:]
            for name, observer in observers.items():
                figures.setdefault(name, []).append(observer.take(len(piece)))
    nll = torch.cat([torch.tensor([torch.nan]), *losses])
    joined = {
        field.name: np.stack([
            torch.cat([getattr(part, field.name)[0] for part in parts]).numpy() for parts in figures.values()
        ])
        for field in fields(MemoryFigures)
    }  # fmt: skip
    return Inspection(ids.numpy(), np.array(pieces), nll.numpy(), np.array(list(figures)), **joined)


def _pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text of each id; a character of several byte pieces belongs to the last piece."""
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(i) for i in ids]
    pieces[-1] += decoder.finish()
    return pieces


def _arrays_path(folder: Path, name: str, source: str) -> Path:
    """Path ``folder``/NAME.npz for a text: the first that is free or holds an inspection of the same ``source``."""
    for path in (folder / f"{name}{number}.npz" for number in chain([""], (f"-{n}" for n in count(2)))):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if str(arrays["source"]) == source:
                    return path
        except (OSError, EOFError, ValueError, KeyError, BadZipFile):  # missing, or no inspection: replaced
            return path
    raise AssertionError


def _write_arrays(result: Inspection, source: str, path: Path):
    with path.open("wb") as file:  # given a path, savez would append .npz
        arrays = {field.name: getattr(result, field.name) for field in fields(result)}
        np.savez_compressed(file, source=np.array(source), **arrays)
