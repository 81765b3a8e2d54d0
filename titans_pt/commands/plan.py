import sys

import click

from titans_pt.commands._arguments import GIB, settings, whole

SECTION = "train"


@click.command()
@settings
@click.option(
    "--ranks", type=whole(1), metavar="N",
    help="number of processes (default: WORLD_SIZE, or the machine's GPUs, or those of one model)",
)  # fmt: skip
@click.option(
    "--memory", type=GIB, metavar="GIB",
    help="GPU memory per rank (default: this machine's; without a GPU the plan is for a CPU and never refused)",
)  # fmt: skip
def plan(config, ranks: int | None, memory: float | None):
    """Show the ranks, memory and hours that a training would need, without starting it."""
    import torch

    from titans_pt.errors import UserError
    from titans_pt.tasks import task_of
    from titans_pt.training.epochs import epochs_text, repeated
    from titans_pt.training.plan import make_plan, unkept

    task = task_of(config)
    if memory is None and config.train.precision == "bf16" and not torch.cuda.is_available():
        print("titans plan: this machine has no GPU, so the plan is for CPUs; --memory 80 plans for GPUs of 80 GiB",
              file=sys.stderr)  # fmt: skip
    plan = make_plan(task, ranks, gpu=None if memory is None else True)
    print("\n".join([plan.text(), *(f"plan: warning: {line}" for line in unkept(config))]))
    try:
        data = task.open()
        print("\n".join([epochs_text(config, data), *(f"plan: warning: {line}" for line in repeated(config, data))]))
    except UserError as error:  # a plan needs no data
        print(f"plan: how often the data is read is not known: {error}")
    plan.check(memory)
