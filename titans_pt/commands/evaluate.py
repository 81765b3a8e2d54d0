import click

from titans_pt.commands._arguments import checkpoint_step, overrides, run_folder

SECTION = "evaluate"


@click.command()
@run_folder
@overrides("evaluation.* settings over the run's")
@checkpoint_step
@click.option(
    "--suite", type=click.Choice(("perplexity", "needle", "babilong", "commonsense")),
    help="one of them (default: perplexity and needle)",
)  # fmt: skip
def evaluate(run: str, overrides: tuple[str, ...], step: int | None, suite: str | None):
    """Measure a trained model: perplexity, needles, BABILong, commonsense."""
    from titans_pt import evaluation

    evaluation.evaluate(run, overrides, step=step, suite=suite)
