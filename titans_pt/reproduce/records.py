"""The record of a run: its settings, curve and figures, in a small JSON file that can be kept without the weights."""

import json
import re
from pathlib import Path
from typing import Any

from titans_pt.config import Config
from titans_pt.config.checks import completed
from titans_pt.errors import UserError
from titans_pt.models.mixers.common import any_memory
from titans_pt.runs.loaded import differences
from titans_pt.tools.files import write_text
from titans_pt.tools.sealed import seal, unseal

_NEEDED = ("failed", "trained", "measured", "config")
INCIDENTAL = ("stop_at", "resume", "micro_batch", "activation_checkpointing", "compile", "wavefront", "log_every",
              "profile_at", "profile_steps", "checkpoint_every", "keep_last", "keep_every", "checkpoint_shards",
              "timeout", "max_nonfinite")  # fmt: skip
"""Settings in ``train`` about speed, memory and files. The others change a run's result."""

PATHS = ("path", "reference")
"""Settings of tasks that name files."""


def decisive(tree: dict) -> dict:
    """The settings that a run's result depends on, except its data."""
    model = dict(tree["model"])
    if not any_memory(model["mixers"]):
        del model["memory"]  # its defaults may change; they do not affect a model without a memory
    # The rows that padding adds to the vocabulary matter, not the multiple that it is padded to.
    model["vocab_multiple"] = -model["vocab_size"] % model["vocab_multiple"]
    task = tree.get("task", "language")
    train = {key: value for key, value in tree["train"].items() if key not in INCIDENTAL}
    if train["init_from"]:  # with --seeds the run may start from another seed of the same row
        train["init_from"] = re.sub(r"-s\d+$", "", Path(train["init_from"]).name)
    if not (train["stop_when"] or train["patience"]):  # no validation ends the run
        del train["eval_every"], train["eval_samples"]
    return {
        "task": task, task: without_folders(tree.get(task, {})),
        "model": model,
        "train": train,
        "data": {key: tree["data"][key] for key in ("seq_len", "reset_at_documents", "reverse_complement")},
        "run": {"seed": tree["run"]["seed"]},
    }  # fmt: skip


def without_folders(section: dict) -> dict:
    """A task's own settings, with paths cut to their last names: folders differ between machines."""
    return {key: Path(value).name if key in PATHS and value else value for key, value in section.items()}


def compare(where: Path, was: dict, config: Config):
    """Check that ``config`` would give the same result as a run with the settings ``was``.

    Args:
        where: the file or folder of the run with the settings ``was``.

    Raises:
        UserError: ``config`` would give another result; names the first difference and what to delete.
    """
    for key, old, new in differences(decisive(completed(was)), decisive(config.model_dump(mode="json"))):
        raise UserError(
            f"{where}: of a run with {key}={old!r}, asked for is {new!r}; choose another folder (--out; run.dir of "
            f"titans recall and needles), or delete the run's record and {config.run.dir} to run it again"
        )


class Records:
    """The records in a folder, one file for each run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def names(self, run: str) -> list[str]:
        """Names of the records of a run, one for each learning rate that it was trained with."""
        return sorted(path.stem for found in (f"{run}.json", f"{run}-lr*.json") for path in self.folder.glob(found))

    def read(self, name: str) -> dict[str, Any] | None:
        """The record of a run; None if there is none yet.

        Raises:
            UserError: the file is damaged.
        """
        try:
            record = unseal(self.path(name).read_bytes())
            if missing := [key for key in _NEEDED if key not in record]:
                raise ValueError(f"{missing[0]!r} is missing")
            return record
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{self.path(name)}: not a record, or a damaged one ({error}); delete it, and run "
                            "again") from None  # fmt: skip

    def of(self, name: str, config: Config) -> dict[str, Any] | None:
        """The record of the run ``name``, which must have had the settings ``config``; None if there is none yet.

        Raises:
            UserError: the run had other settings; names the first difference.
        """
        if (record := self.read(name)) is None:
            return None
        compare(self.path(name), record["config"], config)
        return record

    def write(self, name: str, record: dict[str, Any]):
        """Write a record as a whole or not at all, one line per entry: a changed entry is one changed line."""
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in seal(record).items())
        write_text(self.path(name), "{\n" + ",\n".join(lines) + "\n}\n")
