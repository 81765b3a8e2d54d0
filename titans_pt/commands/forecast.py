from pathlib import Path

import click

from titans_pt.commands._arguments import FILE, PATH, checkpoint_step, overrides, run_folder, whole

SECTION = "evaluate"
WRITES = "--out"


@click.command()
@run_folder
@overrides(
    "forecast.missing, gaps, date_column and date_format, which say how FILE is read and override the run's",
    option="--csv",
)
@click.option(
    "--csv", "own", type=PATH, metavar="FILE", help="a series with the run's columns (default: the run's own)"
)
@click.option("--steps", type=whole(1), metavar="N", help="rows to forecast (default: forecast.horizon)")
@click.option(
    "--out", type=FILE, metavar="FILE",
    help="the CSV file to write, with its picture beside it (default: RUN/forecast/NAME.csv)",
)  # fmt: skip
@checkpoint_step
def forecast(
    run: str, overrides: tuple[str, ...], own: str | None, steps: int | None, out: Path | None, step: int | None
):
    """Forecast and draw the next rows of a CSV file, with their dates."""
    from titans_pt.evaluation.ahead import forecast_file

    forecast_file(run, Path(own) if own else None, steps, out, step, overrides)
