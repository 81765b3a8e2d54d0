import os
import sys

import click

from titans_pt.commands._arguments import Checked, data_settings, whole

SECTION = "data"
WRITES = "data.dir"


def _share(word: str) -> tuple[int, int]:
    index, shares = map(int, word.split("/"))
    if not 0 <= index < shares:
        raise ValueError
    return index, shares


SHARE = Checked(_share, "I/N, with I from 0 to N - 1")


@click.command()
@data_settings
@click.option("--force", is_flag=True, help="replace token files made with other settings")
@click.option(
    "--workers", type=whole(1), default=len(os.sched_getaffinity(0)), metavar="N",
    show_default="all of this machine", help="cores to use",
)  # fmt: skip
@click.option(
    "--shard", type=SHARE, metavar="I/N",
    help="do only this share of the work, I from 0 to N - 1; when all are done, run once without --shard",
)  # fmt: skip
def prepare(config, force: bool, workers: int, shard: tuple[int, int] | None):
    """Turn text into token files, or write the other files that the task reads."""
    if config.task != "language":  # finding another task imports torch, which takes seconds
        from titans_pt.config.checks import checked, import_modules
        from titans_pt.errors import UserError
        from titans_pt.tasks import TASKS, Task, task_of
        from titans_pt.tasks.language import Language

        import_modules(config.run.imports)
        kind = TASKS.find(config.task)
        if kind.prepare is not Language.prepare:
            if shard:
                raise UserError(f"--shard: given {shard[0]}/{shard[1]}, which divides the text of token files, but "
                                f"task={config.task} reads none; leave it out")  # fmt: skip
            task = task_of(checked(config))
            if kind.prepare is Task.prepare:
                print(f"task={config.task}: its samples are drawn, nothing to prepare", file=sys.stderr)
            elif force:
                task.prepare(force)
            else:
                task.prepare()
            return
    from titans_pt.data_pipeline.prepare import prepare as write_token_files

    write_token_files(config, force=force, shard=shard, workers=workers)
