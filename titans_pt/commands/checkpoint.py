from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, checkpoint_step, run_folder, several, whole

SECTION = "train"
STEPS = several(whole(0), "steps of checkpoints, with commas between them, as in 800,900,1000")


@click.group(no_args_is_help=False)
def checkpoint():
    """List, verify, merge, average or delete a run's checkpoints."""


@checkpoint.command("list")
@run_folder
def list_(run: str):
    """List checkpoints: step, size, and the ranks that wrote them."""
    from titans_pt.runs import tools

    tools.list_run(run)


@checkpoint.command()
@run_folder
def verify(run: str):
    """Read every byte of the checkpoints and name damaged ones."""
    from titans_pt.runs import tools

    tools.verify_run(run)


@checkpoint.command()
@run_folder
@checkpoint_step
def merge(run: str, step: int | None):
    """Turn a sharded checkpoint into one with whole tensors."""
    from titans_pt.runs import tools

    tools.merge_run(run, step)


@checkpoint.command()
@run_folder
@click.option("--keep-last", type=whole(1), default=3, metavar="N", help="newest checkpoints to keep")
@click.option("--keep-every", type=whole(1), metavar="N", help="also keep checkpoints whose step is a multiple of N")
def prune(run: str, keep_last: int, keep_every: int | None):
    """Delete old checkpoints, never the newest."""
    from titans_pt.runs import tools

    tools.prune_run(run, keep_last, keep_every)


@checkpoint.command()
@run_folder
@click.option("--out", type=FOLDER, required=True, metavar="RUN2", help="the run folder to write")
@click.option("--last", type=whole(2), default=5, metavar="N", help="average the N newest checkpoints")
@click.option("--steps", type=STEPS, metavar="S,S,...", help="average the checkpoints of these steps instead")
def average(run: str, out: Path, last: int, steps: list[int] | None):
    """Write a run whose weights are the mean of several checkpoints."""
    from titans_pt.runs import tools

    tools.average_run(run, out, last, steps or ())
