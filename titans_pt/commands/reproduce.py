from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, GIB, NAMES, WORDS, overrides, real, several, study_ranks, whole

SECTION = "study"
WRITES = "--out"
SEEDS = several(whole(0), "whole numbers, with commas between")
RATES = several(
    real(lambda rate: 0 < rate <= 1, "a number above 0, at most 1"), "numbers above 0, at most 1, with commas between"
)


@click.command()
@click.argument(
    "target", metavar="TARGET",
    help="table1, table2, table3, table4, table5, figure7, figure8, figure9, babilong, chunks, filters, ideas, "
    "optimizer, recall, needles, ruler, scaling, states or statetracking",
)  # fmt: skip
@overrides("settings for every run, e.g. data.dir=/fast/fineweb", option="--models")
@click.option(
    "--size", type=click.Choice(["tiny", "170m", "340m", "400m", "760m", "1.3b", "paper"]), required=True,
    help="the folder of configs/ to train; paper: for table3 and table4",
)  # fmt: skip
@click.option(
    "--models", type=NAMES, metavar="NAMES",
    help="only these models (default: all in the table); name your own by its config: lmm,my_rule.yaml",
)  # fmt: skip
@click.option(
    "--seeds", type=SEEDS, metavar="N,...",
    help="seeds of weights and data order (default: 0; tiny: up to 0,1,2)",
)  # fmt: skip
@click.option("--out", type=FOLDER, metavar="DIR", help="folder of runs and results (default: runs/reproduce/SIZE)")
@click.option("--tokens", type=whole(1), metavar="N", help="training tokens (default: as configured)")
@click.option(
    "--rates", type=RATES, metavar="LR,...",
    help="the only learning rates to choose from for each model (default: tiny 2e-3,4e-3,8e-3, and more while the best "
    "is the lowest or highest; else the configured one)",
)  # fmt: skip
@study_ranks
@click.option(
    "--submit", type=whole(1), metavar="N", help="queue N workers under SLURM, one node each, instead of running here"
)
@click.option("--sbatch", type=WORDS, metavar="WORDS", help="sbatch options for --submit")
@click.option(
    "--memory", type=GIB, metavar="GIB",
    help="GPU memory per rank, for --dry-run (default: this machine's; without a GPU nothing is refused)",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="print the runs, their cost and their progress")
def reproduce(
    target: str, overrides: tuple[str, ...], size: str, models: list[str] | None, seeds: list[int] | None,
    out: Path | None, tokens: int | None, rates: list[float] | None, ranks: int | None, submit: int | None,
    sbatch: list[str] | None, memory: float | None, dry_run: bool,
) -> int:  # fmt: skip
    """Reproduce a table or figure of the paper: train, evaluate, tabulate."""
    from titans_pt.errors import UserError
    from titans_pt.reproduce import reproduce
    from titans_pt.reproduce.order import Order
    from titans_pt.reproduce.studies import study

    if memory is not None and not dry_run:
        raise UserError(f"--memory: given {memory:g}, which only --dry-run uses, to say what would fit; leave it out")
    if sbatch is not None and submit is None:
        raise UserError("--sbatch: given, but only --submit uses it; leave it out, or give --submit N")
    whole = study(target, size)
    of_trainings = {"--seeds": seeds, "--tokens": tokens, "--rates": rates, "--ranks": ranks, "--memory": memory}
    if whole.timed and (unread := [name for name, value in of_trainings.items() if value is not None]):
        raise UserError(f"{unread[0]}: given, but {target} times a few steps of one process; leave it out")
    order = Order(out or Path("runs/reproduce") / size, models, seeds, tokens, rates or (), overrides)
    if dry_run:
        reproduce.show_plan(whole, order, ranks, memory)
        return 0
    if submit:
        reproduce.planned(whole, order)  # wrong settings are reported here, not in the jobs' logs
        given = {
            "--size": size, "--out": order.out, "--ranks": ranks, "--tokens": tokens, "--models": _joined(models),
            "--seeds": _joined(seeds), "--rates": _joined(rates),
        }  # fmt: skip
        own = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        reproduce.submit([target, *own, *overrides], submit, sbatch or [])
        return 0
    return reproduce.reproduce(whole, order, ranks)


def _joined(words: list | None) -> str | None:
    return ",".join(map(str, words)) if words else None
