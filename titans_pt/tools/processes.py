"""The position of this process in its job, read from torchrun's environment variables.

Clusters, shells and other programs also set some of these variables for their own purposes. Empty variables count as
unset, and a single process needs none.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titans_pt.errors import UserError

_STARTERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Variable with the number of started tasks -> the program that starts them."""

_PROGRESS = "progress"
"""File beside the one in which torchrun expects the error of a process; both are of one start of one process."""


@dataclass(frozen=True)
class Place:
    """``rank`` of ``size`` processes. local_rank: rank on this machine; local_size: processes on this machine; None:
    unknown."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None


def place(environment: Mapping[str, str] = os.environ, strict: bool = True) -> Place:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, and LOCAL_WORLD_SIZE (torchrun) or LOCAL_SIZE (deepspeed).

    Raises:
        UserError: these contradict each other or are not numbers. If not ``strict``, the process then counts as alone.
    """
    try:
        return _place(environment)
    except UserError:
        if strict:
            raise
        return Place()


def _place(environment: Mapping[str, str]) -> Place:
    text = environment.get("WORLD_SIZE")
    size = number(text) if text else 1
    if size is None or size < 1:
        raise UserError(f"WORLD_SIZE: given {text!r}; must be the number of processes; unset it to start only one")
    rank, local_rank = environment.get("RANK"), environment.get("LOCAL_RANK")
    if size > 1 and not rank:
        raise UserError(f"WORLD_SIZE={size} is set, but RANK is not; start with torchrun --nproc_per_node N or with "
                        "launch/torchrun.sh, or unset WORLD_SIZE to start only one process")  # fmt: skip
    place = number(rank or "0")
    if size == 1 and place is None:  # another program set RANK
        place = 0
    if place is None or place >= size:
        raise UserError(
            f"RANK: given {rank!r}; must be a number below WORLD_SIZE, which is {text or 'not set: one process'}; "
            "unset both to start only one process, or start all with torchrun --nproc_per_node N"
        )
    local = number(local_rank) if local_rank else None
    if size > 1 and local_rank and local is None:
        raise UserError(f"LOCAL_RANK: given {local_rank!r}; must be a number: that of this process on its machine")
    here = number(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or "")
    return Place(place, size, local, here or None)


def note_progress(environment: Mapping[str, str] = os.environ):
    """Tells our launcher, if there is one, that a checkpoint was written since this process started."""
    path = environment.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    if path != os.devnull:
        with contextlib.suppress(OSError):
            Path(path).with_name(_PROGRESS).touch()


def made_progress(error_file: str) -> bool:
    """Whether the process to which torchrun gave ``error_file`` has called :func:`note_progress`."""
    return Path(error_file).with_name(_PROGRESS).exists()


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without this process's place in its job, for a command that is no part of the job."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
            "ROLE_NAME", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
            *_STARTERS)  # fmt: skip
    # sbatch hands the environment on: a job that is no array would take our SLURM_ARRAY_TASK_ID for its own.
    begins = ("TORCHELASTIC_", "SLURM_ARRAY_", "SLURM_STEP_")
    return {name: value for name, value in environment.items() if name not in ours and not name.startswith(begins)}


def check_alone(script: str, environment: Mapping[str, str] = os.environ, allowed: int = 1):
    """Refuses to run as one of several processes that do not know of each other.

    Args:
        script: the program to start instead, for the message.
        allowed: largest permitted number of tasks.

    Raises:
        UserError: a cluster's program started several tasks of this command, and WORLD_SIZE is not set.
    """
    if environment.get("WORLD_SIZE"):
        return
    for variable, program in _STARTERS.items():
        tasks = number(environment.get(variable, "")) or 1
        if tasks > allowed:
            raise UserError(
                f"{program} started {tasks} tasks of this command ({variable}={tasks}), which do not know of one "
                f"another: each would do all of the work. {script}. For tasks that are a run each, in folders of their "
                "own, set WORLD_SIZE=1"
            )


def number(text: str) -> int | None:
    """Parses a non-negative whole number; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() else None
