"""Jobs of the process tests on each rank: several short runs in one process, since starting one costs seconds.

    torchrun --standalone --nproc_per_node 2 worker.py CONFIG FOLDER JOB...

A job is ``resume:STAGE:PRECISION``, ``nan:STAGE:TENSOR``, ``switch`` or ``evaluate``; each leaves run folders under
FOLDER for the test to look at.
"""

import math
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs import shard_everything
from tests.helpers.trainings import spoil_logits
from titans_pt.config.files import load_config
from titans_pt.training import loop
from titans_pt.training.ranks import process_group


def train(config: str, folder: Path, name: str, stage: int, *more: str) -> int:
    return loop.train(load_config(config, [f"run.dir={folder / name}", f"parallel.zero_stage={stage}", *more]))


def resume(config, folder, stage, precision):
    """6 steps at once, and 3 + 3."""
    name = f"{stage}-{precision}"
    train(config, folder, f"{name}-whole", stage, f"train.precision={precision}", "train.stop_at=6")
    for stop in (3, 6):
        train(config, folder, f"{name}-parts", stage, f"train.precision={precision}", f"train.stop_at={stop}")


def nan(config, folder, stage, tensor):
    """4 steps, of which rank 0 sees NaN logits in the second (under tensor parallelism: in its part of them)."""
    more = [f"parallel.tensor={tensor}", "train.checkpoint_every=1", "train.keep_last=9", "train.stop_at=4"]
    with nan_logits(step=2):
        train(config, folder, f"{stage}-{tensor}-nan", stage, *more)


def switch(config, folder):
    """3 steps under ZeRO 1, then 3 under ZeRO 3."""
    for stage, stop in ((1, 3), (3, 6)):
        train(config, folder, "switch", stage, f"train.stop_at={stop}")


def evaluate(config, folder):
    """2 steps, a stop, 2 more steps; the suites run at every second step, on tensor ranks under ZeRO 3."""
    more = ["parallel.tensor=2", "model.mixers=[lmm]", "train.max_steps=4", "evaluation.every=2",
            "evaluation.suites=[perplexity,needle]", "evaluation.needle.lengths=[600]",
            "evaluation.needle.depths=[0,100]", "evaluation.needle.samples=1", "evaluation.needle.max_new_tokens=4",
            "evaluation.perplexity.length=32", "evaluation.perplexity.tokens=128"]  # fmt: skip
    train(config, folder, "evaluated", 3, *more, "train.stop_at=2")
    train(config, folder, "evaluated", 3, *more)


@contextmanager
def nan_logits(step: int):
    """Make the model's logits NaN on rank 0 in the forward passes of step ``step``.

    Every step is saved for the test to look at. The run itself would save that step only after the next.
    """

    def saved(trainer):
        signal = take(trainer)
        state = trainer._state()
        trainer.saver.state = lambda: replace(state, nonfinite_in_a_row=0)
        trainer.saver.save()
        trainer.saver.state = trainer._state
        return signal

    with pytest.MonkeyPatch.context() as patch:
        spoilt = spoil_logits(patch, math.nan)
        if torch.distributed.get_rank() == 0:
            spoilt.add(step)
        take = loop.Trainer._train_step
        patch.setattr(loop.Trainer, "_train_step", saved)
        yield


def main(config: str, folder: str, *jobs: str):
    shard_everything()
    with process_group() as ranks:
        loop.process_group = lambda timeout: nullcontext(ranks)
        for job in jobs:
            name, *arguments = job.split(":")
            if name == "resume":
                resume(config, Path(folder), int(arguments[0]), arguments[1])
            elif name == "nan":
                nan(config, Path(folder), *map(int, arguments))
            else:
                {"switch": switch, "evaluate": evaluate}[name](config, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
