"""Start of a run: at step 0, or from a checkpoint that its settings can continue."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from titans_pt.config import Config, TrainConfig
from titans_pt.config.checks import completed
from titans_pt.config.history import as_begun
from titans_pt.errors import UserError
from titans_pt.runs import checkpoints
from titans_pt.runs.checkpoints import TrainerState
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.loaded import differences, load_weights
from titans_pt.tasks import Task
from titans_pt.training.engine import Engine
from titans_pt.training.ranks import Ranks
from titans_pt.training.schedule import SCHEDULE, learning_rate
from titans_pt.training.transfer import Weights, check_fit, find_weights, fresh_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Start of a run.

    config: the task's settings, as they were when the run began.
    checkpoint, state: the checkpoint to continue from; None: a new run.
    branch: whether there are later checkpoints (train.resume=STEP), to set aside before the first step.
    weights: source of a new run's initial weights; None: random initialisation.
    revalidate: whether validation settings changed, which makes the checkpoint's validation losses incomparable.
    """

    config: Config
    checkpoint: Path | None = None
    state: TrainerState | None = None
    weights: Weights | None = None
    branch: bool = False
    revalidate: bool = False


def find_start(task: Task, folder: RunFolder, identity: dict[str, str]) -> Start:
    """Finds the checkpoint to continue from, or the weights to start with.

    Args:
        identity: identity of the task's data, see TaskData.

    Raises:
        UserError: train.resume=never but there are checkpoints; train.resume names a step without a checkpoint; all
            checkpoints are damaged; the settings cannot continue them, or end before them; train.init_from has no
            weights of this model.
    """
    checkpoints.clean(folder.checkpoints)  # an old shard of a rank must not be taken for a new one
    resume, found = task.config.train.resume, checkpoints.list_checkpoints(folder.checkpoints)
    path: Path | None
    if isinstance(resume, int):
        path = _chosen(task.config, folder, resume)
    else:
        path = checkpoints.newest_complete(folder.checkpoints)
    if resume == "never" and found and not (path and _same_command(path, task.config)):
        raise UserError(
            f"train.resume: given 'never', but {folder.path} holds checkpoints up to {found[-1].name}; "
            "set train.resume=auto to continue, or another run.dir"
        )
    if path is None:
        return _fresh(task, identity)
    state = checkpoints.read_state(path)
    config, old = as_begun(task.config, state.config), completed(state.config)
    check_resumable(path, state, old, task, config, identity)
    _check_trained(path, state, folder)
    _check_end(path, state, config, folder)
    later = any(checkpoints.step_of(each) > state.step for each in found)
    revalidate = not _same_validation(old, config)
    if config.train.patience and state.best and (why := _without_best(state, folder, revalidate)):
        log.warning("train.patience: %s; it counts from step %d on", why, state.step)
        state = replace(state, best={})
    return Start(config, path, state, branch=isinstance(resume, int) and later, revalidate=revalidate)


def _same_validation(old: dict, config: Config) -> bool:
    """Whether validation losses under the ``old`` settings are comparable with later ones."""
    new = config.model_dump(mode="json")
    settings = (("train", "eval_samples"), ("data", "reset_at_documents"))
    return all(old[section].get(key) == new[section][key] for section, key in settings)


def _without_best(state: TrainerState, folder: RunFolder, revalidate: bool) -> str:
    """The reason why the best validation so far no longer counts; "" if it still counts."""
    if revalidate:
        return "the validation is another one than before (train.eval_samples, data.reset_at_documents)"
    step = int(state.best["step"])
    if step != state.step and not checkpoints.checkpoint_path(folder.checkpoints, step).is_dir():
        return f"the checkpoint of the best validation, of step {step}, is gone"
    return ""


def set_aside(folder: RunFolder, step: int):
    """Moves checkpoints after ``step`` out of the way, for a run with train.resume=STEP."""
    for place in checkpoints.set_aside(folder.checkpoints, step):
        log.warning("train.resume: the run continues at step %d; a later checkpoint is now %s (delete it if it is not "
                    "needed)", step, place)  # fmt: skip


def build_engine(task: Task, start: Start, ranks: Ranks) -> Engine:
    """Builds the engine with the weights and optimiser state of ``start``; ``task.config`` is start.config."""
    torch.manual_seed(task.config.run.seed)
    model = task.build_model()
    if start.weights or start.checkpoint:
        ranks.on_first(lambda: _load(model, start, task))  # else a thousand ranks would each read every weight
        for p in model.parameters():
            ranks.broadcast(p.detach())
    engine = Engine(task, model, ranks)
    if start.state is None:
        return engine
    assert start.checkpoint
    with checkpoints.Tensors(start.checkpoint) as tensors:
        engine.masters.load_moments(tensors, start.state.adam_step)
    return engine


def _load(model: nn.Module, start: Start, task: Task):
    if start.checkpoint:
        load_weights(model, checkpoints.read_weights(start.checkpoint))
    elif start.weights:
        start.weights.load(model, fresh_of(task, task.config))


def _fresh(task: Task, identity: dict[str, str]) -> Start:
    """Start of a new run. train.init_from is used only until the run has a checkpoint."""
    given = task.config.train.init_from
    if given is None:
        return Start(task.config)
    weights = find_weights(given)
    rows = {"vocab_multiple": task.config.model.vocab_multiple}  # weights fit any number of rows
    config = as_begun(task.config, weights.config)
    config = config.model_copy(update={"model": config.model.model_copy(update=rows)})
    check_fit(weights, task, config, identity)
    return Start(config, weights=weights)


def _chosen(config: Config, folder: RunFolder, step: int) -> Path:
    """The checkpoint for train.resume=STEP: the one of STEP, or the newest that this same command wrote later.

    Raises:
        UserError: STEP has no complete checkpoint.
    """
    for path in reversed(checkpoints.list_checkpoints(folder.checkpoints)):
        if checkpoints.step_of(path) > step and not checkpoints.verify(path):
            if _same_command(path, config):
                return path
            break
    try:
        return checkpoints.find(folder.checkpoints, step)
    except UserError as error:
        raise UserError(f"train.resume: given {step}; {error}") from None


def _same_command(path: Path, config: Config) -> bool:
    """Whether this same command wrote the checkpoint: its training settings are equal.

    A launcher that restarts the command, after a lost node for example, must not lose its progress.
    """
    return completed(checkpoints.read_state(path).config).get("train") == config.model_dump(mode="json")["train"]


def check_resumable(
    path: Path, state: TrainerState, old: dict, task: Task, config: Config, identity: dict[str, str]
):  # fmt: skip
    """Refuses changed settings that the run cannot continue with; logs all other changes.

    The position in the data is a number of samples. Their order depends on run.seed, data.seq_len and the data, which
    must not change. The batch, number of ranks, ZeRO stage and precision may change: the run continues at the same
    sample.

    Args:
        old: the checkpoint's settings, completed.

    Raises:
        UserError: names the key, both values and the remedy.
    """
    remedy = "put it back, or set another run.dir to start from scratch"
    new = config.model_dump(mode="json")
    if old.get("task", task.name) != task.name:
        raise UserError(f"task: given {task.name!r}, but {path} was trained for {old['task']!r}; {remedy}")
    for key, was, now in differences(old["model"], new["model"]):
        raise UserError(f"model.{key}: given {now!r}, but {path} was trained with {was!r}; {remedy}")
    for section, key in (("data", "seq_len"), ("run", "seed")):
        was, now = old[section][key], new[section][key]
        if was != now:
            raise UserError(
                f"{section}.{key}: given {now!r}, but {path} was trained with {was!r}; the order of the data depends "
                f"on it, and samples would be repeated or left out; {remedy}"
            )
    was, now = old["train"].get("trainable", []), new["train"]["trainable"]
    if set(was) != set(now):  # patterns: their order chooses nothing
        raise UserError(
            f"train.trainable: given {now}, but {path} was trained with {was}, and has the optimiser's state "
            "of those alone; put it back, or start another run.dir from its weights (train.init_from)"
        )
    was, now = old["train"].get("optimizer", "adamw"), new["train"]["optimizer"]
    if was != now:
        raise UserError(
            f"train.optimizer: given {now!r}, but {path} was trained with {was!r}, and has its state; put it back, or "
            "start another run.dir from its weights (train.init_from)"
        )
    for key, now in identity.items():
        if (was := state.identity.get(key, now)) != now:  # earlier versions did not write all keys
            for own, before, given in differences(old.get(task.name, {}), new.get(task.name, {})):
                raise UserError(f"{task.name}.{own}: given {given!r}, but {path} was trained with {before!r}; {remedy}")
            before, given = ([source.get("weight") for source in tree["data"]["sources"]] for tree in (old, new))
            if key == "data" and before != given and len(before) == len(given):
                raise UserError(f"data.sources: given the weights {given}, but {path} was trained with "
                                f"{before}, so samples would be repeated or left out; {remedy}")  # fmt: skip
            raise UserError(f"{task.differs(key, path, was, now)}; {remedy}")
    _tell_schedule(old, config, state.step + 1, task)
    for key, was, now in differences(old, new):
        if key.partition(".")[0] in ("train", "parallel", "data"):
            log.info("resumed at step %d with another %s: %r, was %r", state.step, key, now, was)


def _check_trained(path: Path, state: TrainerState, folder: RunFolder):
    """
    Raises:
        UserError: no training wrote the checkpoint, which has no optimiser state.
    """
    if state.samples:
        return
    with checkpoints.Tensors(path) as tensors:
        if any(tensors.moments().values()):
            return
    raise UserError(
        f"run.dir: {folder.path} holds weights without an optimiser's state, as titans import, convert and checkpoint "
        f"average write them; train them in a folder of their own: run.dir=NEW train.init_from={folder.path}"
    )


def _check_end(path: Path, state: TrainerState, config: Config, folder: RunFolder):
    """Refuses a checkpoint later than the settings' last step.

    Raises:
        UserError: the run is already beyond the step at which the settings end it.
    """
    train = config.train
    key, end = ("stop_at", train.stop_at) if train.stop_at else ("max_steps", train.max_steps)
    if state.step <= end:
        return
    steps = [checkpoints.step_of(each) for each in checkpoints.list_checkpoints(folder.checkpoints)]
    before = [step for step in steps if step <= end]
    back = f"; train.resume={before[-1]} goes back to an earlier checkpoint" if before else ""
    raise UserError(f"train.{key}: given {end}, but {path} is of step {state.step}; set {state.step} or more, or "
                    f"another run.dir to start from scratch{back}")  # fmt: skip


def _tell_schedule(old: dict, config: Config, step: int, task: Task):
    """Warns if changed settings move the learning-rate schedule, or the stages of a task's lengths.

    Both are functions of the step.
    """
    try:
        was, now = TrainConfig.model_validate(old.get("train")), config.train
    except ValidationError:  # settings of another version, which this one cannot read
        return
    changed = [
        f"train.{key} {getattr(now, key)!r}, was {getattr(was, key)!r}"
        for key in SCHEDULE
        if getattr(now, key) != getattr(was, key)
    ]
    if changed:
        rates = (task.learning_rate(step, learning_rate(step, train)) for train in (now, was))
        log.warning("another schedule (%s): the learning rate of step %d is %.3g, with the former settings it would be "
                    "%.3g", "; ".join(changed), step, *rates)  # fmt: skip
    if was.max_steps != now.max_steps and hasattr(task.settings, "lengths"):
        parts = [f"{min(1.0, (step - 1) / steps):.0%}" for steps in (now.max_steps, was.max_steps)]
        log.warning("the stages of %s.lengths are parts of train.max_steps: step %d begins after %s of them, with the "
                    "former settings after %s", task.name, step, *parts)  # fmt: skip
