"""Initial weights that a new run takes from another run: train.init_from."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.config.checks import completed
from titans_pt.data_pipeline import saved_tokenizer
from titans_pt.errors import UserError
from titans_pt.layers.lora import is_adapter
from titans_pt.runs import checkpoints
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import differences, with_rows
from titans_pt.tasks import Task
from titans_pt.tools.patterns import check_patterns, matches
from titans_pt.tools.tensor_files import check_sums, open_tensors

log = logging.getLogger(__name__)
EXPORTED = "model."
"""Prefix of our parameter names in an exported folder."""
_REMEDY = "make the settings alike, or name what is to start fresh in train.init_fresh"


@dataclass(frozen=True)
class Weights:
    """Weights on disk that a run can start with.

    origin: path and hash, for the record.
    path: a checkpoint, or an exported folder, whose names begin with EXPORTED.
    config: the settings tree that the weights were trained with.
    identity: as in :class:`~titans_pt.runs.checkpoints.TrainerState`.
    """

    origin: str
    path: Path
    config: dict[str, Any]
    identity: dict[str, str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by plain parameter name."""
        with self._open() as (shapes, _):
            return shapes

    @torch.no_grad()
    def load(self, model: nn.Module, fresh: list[str]):
        """Copies the weights into ``model``.

        Parameters that match a pattern of ``fresh`` keep their values, as do adapters that the file lacks.
        """
        counted = counted_rows(model)
        with self._open() as (there, get):
            for name, p in model.named_parameters():
                if not _starts_fresh(name, fresh, there):
                    found = get(name)
                    p.copy_(with_rows(found[: counted[name]], len(p)) if name in counted else found)

    @contextmanager
    def _open(self) -> Iterator[tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]]:
        """Opens the files and yields (shapes by name, function from name to tensor)."""
        with ExitStack() as stack:
            if (self.path / checkpoints.MANIFEST).is_file():
                tensors = stack.enter_context(checkpoints.Tensors(self.path))
                yield tensors.shapes(), partial(tensors.get, checkpoints.WEIGHT)
                return
            files = [stack.enter_context(open_tensors(file)) for file in _exported(self.path)]
            places = {key.removeprefix(EXPORTED): (file, key) for file in files for key in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(key).get_shape()) for name, (file, key) in places.items()}
            yield shapes, lambda name: places[name][0].get_tensor(places[name][1])


def counted_rows(model: nn.Module) -> dict[str, int]:
    """Parameter -> number of rows in use, for parameters with a vocabulary that is rounded up; others are absent."""
    return getattr(model, "counted_rows", {})


def find_weights(given: str) -> Weights:
    """Finds the weights that ``train.init_from`` names: a run (its newest complete checkpoint, with train.patience the
    best), a checkpoint, or an exported folder.

    Raises:
        UserError: ``given`` is none of these, or is damaged.
    """
    path = Path(given)
    try:
        if checkpoints.is_checkpoint(path):
            return _of_checkpoint(checkpoints.find(path.parent, checkpoints.step_of(path)))
        if RunFolder(path).config.is_file():
            folder = RunFolder(path).checkpoints
            return checkpoints.undisturbed(folder, lambda: _of_checkpoint(checkpoints.find(folder)))
        if (path / "config.json").is_file():
            return _of_export(path)
    except UserError as error:
        raise UserError(f"train.init_from: given {given}; {error}") from None
    raise UserError(f"train.init_from: given {given}, which is neither a run's folder nor one of its checkpoints "
                    "(checkpoints/step-...) nor a folder that titans export wrote; name one of these")  # fmt: skip


def _of_checkpoint(path: Path) -> Weights:
    state = checkpoints.read_state(path)
    origin = f"{path} ({checkpoints.checkpoint_hash(path)[:12]})"
    return Weights(origin, path, completed(state.config), state.identity)


def _of_export(path: Path) -> Weights:
    """Weights of a folder that titans export wrote, in Hugging Face's layout."""
    check_sums(path)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        settings, origin = completed(config["settings"]), f"{path} ({config['checkpoint_hash'][:12]})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"its config.json is not of titans export, or damaged ({error!r})") from None
    for file in _exported(path):
        if not file.is_file():
            raise UserError(f"it holds no {file.name}")
        try:
            with open_tensors(file):
                pass
        except SafetensorError as error:
            raise UserError(f"its {file.name} is damaged ({error}); copy or export it again") from None
    tokenizer = saved_tokenizer(path)
    found = tokenizer.is_file()
    identity = {"tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest()} if found else {}
    return Weights(origin, path, settings, identity)


def _exported(path: Path) -> list[Path]:
    """Files of an exported folder that hold weights: a single file, or all files that its index names."""
    index = path / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        return [path / name for name in sorted(names)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"its {index.name} is damaged ({error!r}); copy or export it again") from None


def fresh_of(task: Task, config: Config) -> list[str]:
    """The user's and the task's patterns for parameters that train.init_from does not fill."""
    return [*config.train.init_fresh, *task.own_end]


def check_fit(weights: Weights, task: Task, config: Config, identity: dict[str, str]):
    """Refuses weights that do not fill the model, except for train.init_fresh; warns of settings that differ.

    Args:
        identity: identity of the task's data, see TaskData.

    Raises:
        UserError: another task, parameters that differ in name or shape, or another tokenizer.
    """
    if (was := weights.config.get("task", task.name)) not in (task.name, *task.takes):
        known = " or ".join(map(repr, (task.name, *task.takes)))
        raise UserError(f"train.init_from: {weights.origin} was trained for the task {was!r}, not {known}; name "
                        f"a run of {'one of these' if task.takes else 'the same task'}")  # fmt: skip
    fresh = fresh_of(task, config)
    with torch.device("meta"):
        model = task.build_model()
    here = {name: tuple(p.shape) for name, p in model.named_parameters()}
    there = weights.shapes()
    check_patterns("train.init_fresh", config.train.init_fresh, here | there, "parameter")
    different = list(differences(weights.config.get("model", {}), config.model.model_dump(mode="json")))
    settings = ", ".join(f"model.{key}={was!r} there and {now!r} here" for key, was, now in different[:4])
    settings = f" ({settings})" if settings else ""
    log.info("weights of %s; %d of %d parameters start fresh", weights.origin,
             sum(_starts_fresh(n, fresh, there) for n in here), len(here))  # fmt: skip
    here = {name: shape for name, shape in here.items() if not _starts_fresh(name, fresh, there)}
    there = {name: shape for name, shape in there.items() if not matches(name, fresh)}
    missing, extra = here.keys() - there.keys(), there.keys() - here.keys()
    for problem, names in (("are not in it", missing), ("are in it alone", extra)):
        if names:
            raise UserError(f"train.init_from: {weights.origin}: {len(names)} parameters {problem}, such as "
                            f"{min(names)}{settings}; {_REMEDY}")  # fmt: skip
    counted = counted_rows(model)

    def fits(name: str) -> bool:
        if name in counted:
            return there[name][0] >= counted[name] and there[name][1:] == here[name][1:]
        return there[name] == here[name]

    if wrong := [name for name in here if not fits(name)]:
        name = wrong[0]
        raise UserError(f"train.init_from: {weights.origin}: {len(wrong)} parameters have another shape, such as "
                        f"{name}, {there[name]} there and {here[name]} here{settings}; {_REMEDY}")  # fmt: skip
    for key, name in task.bound.items():
        was, now = weights.identity.get(key, ""), identity[key]
        if was != now and not matches(name, fresh):
            raise UserError(f"{task.differs(key, Path(weights.origin), was, now)}; use that one (for a tokenizer: "
                            f"data.tokenizer.path), or let {name} start fresh: train.init_fresh=[{name}]")  # fmt: skip
    for key, there_is, here_is in different:
        log.warning("train.init_from: model.%s is %r, %s was trained with %r", key, here_is, weights.origin, there_is)


def _starts_fresh(name: str, fresh: list[str], there: Mapping[str, Any]) -> bool:
    """Whether a parameter keeps its initial values; ``there``: shapes in the file, by name."""
    return matches(name, fresh) or (is_adapter(name) and name not in there)
