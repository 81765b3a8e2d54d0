from pathlib import Path

import click

from titans_pt.commands._arguments import FOLDER, Checked, checkpoint_step, overrides, run_folder, several, whole

SECTION = "tools"
WRITES = "--out"
NUMBERS = several(whole(0), "numbers of layers from 0 on, as in 3,10,20")
LAYERS = Checked(lambda words: None if words == "all" else NUMBERS.read(words), f"all, or {NUMBERS.allowed}")


@click.command()
@run_folder
@overrides("settings of the new run, e.g. model.memory.chunk_size=64")
@click.option("--to", type=click.Choice(["titans", "liza", "full", "window"]), required=True,
              help="titans: a window with a memory beside it; window: the window alone, its control; liza: TPTT's "
              "mixture with a delta rule, a baseline; full: full attention in --layers")  # fmt: skip
@click.option("--window", type=whole(1), required=True, metavar="W", help="tokens that attention sees")
@click.option("--sinks", type=whole(0), default=4, metavar="S", help="first tokens that stay visible")
@click.option("--layers", type=LAYERS, default="all", metavar="N,N,...",
              help="layers that --to changes, counted from 0; the others have only the window")  # fmt: skip
@click.option("--out", type=FOLDER, required=True, metavar="RUN2", help="the run folder to write")
@checkpoint_step
def convert(
    run: str, overrides: tuple[str, ...], to: str, window: int, sinks: int, layers: list[int] | None, out: Path,
    step: int | None,
):  # fmt: skip
    """Give a run with full attention a window and a memory.

    The new run computes what the source computes under that window, bit for bit, until it is trained. With --to full,
    chosen layers keep full attention.
    """
    from titans_pt.runs.conversion import convert_run

    print(convert_run(run, out, to, window, sinks, layers, overrides, step))
