"""Where a run begins: at step 0, or at a checkpoint that its settings can continue."""

import logging
from pathlib import Path

from titans_pt import checkpoints
from titans_pt.checkpoints import TrainerState
from titans_pt.config import Config
from titans_pt.config_check import completed
from titans_pt.config_history import as_begun
from titans_pt.errors import UserError
from titans_pt.run import differences
from titans_pt.run_folder import RunFolder
from titans_pt.tasks import Task

log = logging.getLogger(__name__)


def find_start(
    task: Task, folder: RunFolder, identity: dict[str, str]
) -> tuple[Path, TrainerState, Config] | None:
    """The (checkpoint, its state, the task's settings as the run began with them) to continue from, or None to start.

    Args:
        identity: of the task's data, see TaskData.

    Raises:
        UserError: train.resume=never and there are checkpoints; all are damaged; the settings do not continue them.
    """
    if task.config.train.resume == "never":
        if found := checkpoints.list_checkpoints(folder.checkpoints):
            raise UserError(
                f"train.resume: given 'never', but {folder.path} holds checkpoints up to {found[-1].name}; "
                "set train.resume=auto to continue, or another run.dir"
            )
        return None
    checkpoints.clean(folder.checkpoints)
    path = checkpoints.newest_complete(folder.checkpoints)
    if path is None:
        return None
    state = checkpoints.read_state(path)
    config = as_begun(task.config, state.config)
    check_resumable(path, state, task, config, identity)
    return path, state, config


def check_resumable(path: Path, state: TrainerState, task: Task, config: Config, identity: dict[str, str]):
    """Refuses settings that would make the run another one; logs all other changes.

    The position in the data is a number of samples in an order made from run.seed, data.seq_len and the data, so
    these must stay. Another batch, number of ranks, ZeRO stage or precision continues at the same sample.

    Raises:
        UserError: names the key, both values and the remedy.
    """
    remedy = "put it back, or set another run.dir to start from scratch"
    old, new = completed(state.config), config.model_dump(mode="json")
    if old.get("task", task.name) != task.name:
        raise UserError(f"task: given {task.name!r}, but {path} was trained for {old['task']!r}; {remedy}")
    for key, was, now in differences(old["model"], new["model"]):
        raise UserError(f"model.{key}: given {now!r}, but {path} was trained with {was!r}; {remedy}")
    for section, key in (("data", "seq_len"), ("run", "seed")):
        was, now = old[section][key], new[section][key]
        if was != now:
            raise UserError(
                f"{section}.{key}: given {now!r}, but {path} was trained with {was!r}; the order of the data depends "
                f"on it, so samples would be repeated or left out; {remedy}"
            )
    for key, now in identity.items():
        if (was := state.identity.get(key, "")) != now:
            raise UserError(f"{task.differs(key, path, was, now)}; {remedy}")
    for key, was, now in differences(old, new):
        if key.partition(".")[0] in ("train", "parallel", "data"):
            log.info("resumed at step %d with another %s: %r, was %r", state.step, key, now, was)
