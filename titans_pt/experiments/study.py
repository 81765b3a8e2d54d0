"""What the experiments share: samples that can be drawn again, training on the answers, one record for each model."""

import math
import pickle
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titans_pt.config import Config, TrainConfig
from titans_pt.config_check import mixers_of
from titans_pt.layers.memory import MemoryGates
from titans_pt.models.mixers.common import any_memory
from titans_pt.tasks.base import backbone_of
from titans_pt.tools.files import write_atomically
from titans_pt.tools.records import RecordFile, read_records
from titans_pt.training.engine import parameter_groups
from titans_pt.training.schedule import learning_rate

EVALUATION_SEED = 2**31
"""Far from any run.seed: evaluation never meets a sample of training."""
REPORT_EVERY = 50
ENOUGH = 0.99
"""Share of right answers: over REPORT_EVERY steps (new samples each) training ends early; at a step writing costs."""


class Samples(ABC):
    """A task whose samples are pure functions of (seed, index)."""

    @abstractmethod
    def sample(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (length,) int64, and the places (P,) of the keys that are asked; the answer follows each."""

    def batch(self, seed: int, first: int, rows: int) -> tuple[Tensor, Tensor]:
        """Samples first .. first + rows - 1: ids (rows, length) and places (rows, P), both int64."""
        samples = [self.sample(seed, first + row) for row in range(rows)]
        ids, places = (np.stack(part) for part in zip(*samples, strict=True))
        return torch.from_numpy(ids), torch.from_numpy(places)


def models_of(config: Config) -> list[str]:
    """The model that its file or the command line names, ``mamba+swa`` if its layers differ; none if model.mixers was
    not given."""
    return ["+".join(config.model.mixers)] if "mixers" in config.model.model_fields_set else []


def has_memory(model: str) -> bool:
    """Whether a Titan's memory is in it."""
    return any_memory(mixers_of(model))


def fit(
    model: nn.Module,
    settings: TrainConfig,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    name: str,
    may_end_at: int = 0,
    kept: Path | None = None,
    write_cost: float = 0.0,
) -> dict:
    """Trains ``model`` on the answers of batches 0, 1, ... (see :func:`answers`).

    It ends early once the accuracy over REPORT_EVERY steps is ENOUGH, but not before step ``may_end_at``, and not if
    writing costs: then gates close long after all answers are right. A step whose gradient is not finite changes
    nothing; training ends at a report all of whose steps were such.

    Args:
        kept: file of weights and moments every REPORT_EVERY steps: with it a killed training continues, bit for bit. It
            must identify all other arguments. Whoever keeps the result deletes it.
        write_cost: factor of the mean of :func:`written`, which is added to the loss of a step whose answers are right
            (to ENOUGH): what a memory need not write costs more than it gains, however little it harms. At other steps
            it would close gates before it is known what they are good for.

    Returns:
        steps taken, seconds, and the curve: [step, loss, accuracy, gradient norm], means over REPORT_EVERY steps.
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay), betas=tuple(settings.betas), eps=settings.eps
    )
    backbone = backbone_of(model)
    curve, window, began, done = [], [], time.perf_counter(), 0
    if kept and (saved := _load(kept, name)):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        curve, done, began = saved["curve"], saved["step"], began - saved["seconds"]
        print(f"{name}: continues after step {done}", flush=True)
    for step in range(done + 1, settings.max_steps + 1):
        lr = learning_rate(step, settings)
        backbone.set_progress(step / settings.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with written(model) as shares:
            loss, right = answers(model, *batch(step - 1))
        total = loss
        if write_cost and shares and right.float().mean() >= ENOUGH:
            total = loss + write_cost * torch.cat(shares).mean()
        optimizer.zero_grad()
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip, error_if_nonfinite=False)
        if norm.isfinite():
            optimizer.step()
        window.append((loss.item(), right.float().mean().item(), norm.item()))
        if step % REPORT_EVERY == 0 or step == settings.max_steps:
            means = [sum(column) / len(window) for column in zip(*window, strict=True)]
            curve.append([step, *means])
            seconds = time.perf_counter() - began
            print(
                f"{name}: step {step} loss {means[0]:.3f} accuracy {100 * means[1]:.1f} % "
                f"gradient norm {means[2]:.2f} {seconds:.0f} s",
                flush=True,
            )
            if not any(math.isfinite(norm) for *_, norm in window):
                print(f"{name}: ends here, since no gradient of the last {len(window)} steps was finite", flush=True)
                break
            if means[1] >= ENOUGH and step >= may_end_at and not write_cost:
                break
            window = []
            if kept:
                _save(kept, model, optimizer, curve=curve, step=step, seconds=seconds)
    return {"steps": step, "seconds": time.perf_counter() - began, "curve": curve}


@contextmanager
def written(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the list gets the gate of writing, 0 to 1, of all tokens and heads of each memory that reads.

    It is theta / (bound (1 - eta)): a cost of theta alone is paid by more momentum, and nothing closes.
    """
    shares: list[Tensor] = []

    def note(gates: MemoryGates, _: Any, made: tuple[Tensor, ...]):
        theta, eta, _ = made
        shares.append((theta / (gates.bound * (1 - eta))).flatten())

    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, MemoryGates)]
    try:
        yield shares
    finally:
        for hook in hooks:
            hook.remove()


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **said: Any):
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **said}
    write_atomically(path, lambda temporary: torch.save(saved, temporary))


def _load(path: Path, name: str) -> dict[str, Any] | None:
    """What :func:`_save` wrote; None if there is nothing, or if it is damaged: the training then starts again."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as parts:  # torch does not compare the checksums of a file's parts
            if part := parts.testzip():
                raise zipfile.BadZipFile(f"bad checksum of {part}")
        return torch.load(path, weights_only=True)
    except (zipfile.BadZipFile, zlib.error, ValueError, LookupError, RuntimeError, EOFError, NotImplementedError,
            pickle.UnpicklingError) as error:  # fmt: skip
        print(f"{name}: {path} is damaged ({error}), so training starts at step 1 again", flush=True)
        return None


def answers(model: nn.Module, ids: Tensor, places: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
    """ids (B, T), places (B, P) of keys -> mean loss of the values after them, and (B, P) bool: the best guess is it.

    Nothing but the answers counts: the loss of all other tokens is that of random draws.
    """
    logits, _ = model(ids, state)
    row = torch.arange(len(ids))[:, None]
    logits, target = logits[row, places], ids[row, places + 1]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits.argmax(-1) == target


def once(path: Path, key: str, name: str, make: Callable[[], dict]):
    """Appends the record that ``make`` returns to ``path`` under ``key``, unless it is there."""
    if path.exists() and key in read_records([path]):
        print(f"{name}: there already ({path})", flush=True)
        return
    record = make()
    with RecordFile(path) as file:
        file.append({"key": key} | record)


def newest(folder: Path) -> dict[Path, dict]:
    """The last record of each file in ``folder`` that has one."""
    records = {path: list(read_records([path]).values()) for path in folder.glob("*.jsonl")}
    return {path: of_file[-1] for path, of_file in records.items() if of_file}


def spanned(mean: float, each: list[float]) -> str:
    """A table's cell: the mean over seeds and, where they differ, the lowest and the highest."""
    low, high = f"{min(each):.1f}", f"{max(each):.1f}"
    return f"{mean:.1f}" if low == high else f"{mean:.1f} ({low} to {high})"
