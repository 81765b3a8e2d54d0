import click

from titans_pt.commands._arguments import checkpoint_step, run_folder, whole

SECTION = "train"


@click.group(no_args_is_help=False)
def checkpoint():
    """List, verify, merge or delete a run's checkpoints."""


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
