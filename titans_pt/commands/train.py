import click

from titans_pt.commands._arguments import settings

SECTION = "train"
WRITES = "run.dir"


@click.command()
@settings
def train(config) -> int:
    """Train a model, or continue its training from the newest complete checkpoint."""
    from titans_pt.tools.processes import check_alone
    from titans_pt.training import loop

    check_alone("Submit it with sbatch launch/slurm_train.sh CONFIG, or start one process per GPU with "
                "launch/torchrun.sh CONFIG")  # fmt: skip
    return loop.train(config)
