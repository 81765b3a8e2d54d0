from pathlib import Path

import click

from titans_pt.commands._arguments import FILE, checkpoint_step, real, run_folder, whole

SECTION = "evaluate"


@click.command()
@run_folder
@click.option("--prompt", metavar="TEXT", help="text to continue; it may be left out with --state")
@click.option(
    "--prompt-file", type=click.Path(), metavar="FILE", help="a text file to continue (UTF-8); - is standard input"
)
@click.option("--max-new-tokens", type=whole(1), default=100, metavar="N", help="tokens to write at most")
@click.option(
    "--temperature", type=real(lambda t: t == 0 or 1e-6 <= t <= 1e6, "0, or a number from 0.000001 to a million"),
    default=0.8, metavar="T", help="0 is greedy",
)  # fmt: skip
@click.option("--top-k", type=whole(1), metavar="N", help="draw from the N likeliest tokens (default: all)")
@click.option(
    "--top-p", type=real(lambda p: 0 < p <= 1, "a number above 0 and at most 1"), default=0.95, metavar="P",
    help="draw from the fewest tokens that hold this probability",
)  # fmt: skip
@click.option("--seed", type=whole(0), default=0, metavar="N", help="of the draws")
@checkpoint_step
@click.option("--save-state", type=FILE, metavar="FILE", help="keep the state after prompt and new text")
@click.option("--state", type=click.Path(), metavar="FILE", help="continue from a state that --save-state wrote")
def generate(
    run: str, prompt: str | None, prompt_file: str | None, max_new_tokens: int, temperature: float, top_k: int | None,
    top_p: float, seed: int, step: int | None, save_state: Path | None, state: str | None,
):  # fmt: skip
    """Continue a prompt, with the memory carried along."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other; leave one out.")
    if not prompt and prompt_file is None and state is None:
        raise click.UsageError("Nothing to continue: give --prompt, --prompt-file or --state.")
    from titans_pt.tools.files import read_text

    if prompt_file is not None:
        prompt = read_text(prompt_file, "--prompt-file")
    from titans_pt import evaluation

    evaluation.generate(
        run, prompt, max_new_tokens, temperature, top_k, top_p, seed, step, state_file=state, save_to=save_state
    )
