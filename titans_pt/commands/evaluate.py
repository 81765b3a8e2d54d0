from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, checkpoint_step, overrides, run_folder

SECTION = "evaluate"
WRITES = "--out"


@click.command()
@run_folder
@overrides("evaluation.* settings that override the run's, and data.dir", option="--suite")
@checkpoint_step
@click.option(
    "--suite", metavar="NAME",
    help="a suite of the task; for language: perplexity, needle, babilong, commonsense (default: the first two)",
)  # fmt: skip
@click.option(
    "--out", type=FOLDER, metavar="DIR",
    help="folder of results and pictures, for a read-only run (default: RUN)",
)  # fmt: skip
def evaluate(run: str, overrides: tuple[str, ...], step: int | None, suite: str | None, out: Path | None):
    """Evaluate a trained model: perplexity, needles, BABILong, commonsense."""
    from titans_pt import evaluation
    from titans_pt.tools.processes import check_alone

    check_alone("Submit it with sbatch --array 0-7 launch/slurm_evaluate.sh RUN, whose tasks share the samples")
    evaluation.evaluate(run, overrides, step=step, suite=suite, out=out)
