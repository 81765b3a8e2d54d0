import click

from titans_pt.commands._arguments import checkpoint_step, real, run_folder, whole

SECTION = "evaluate"


@click.command()
@run_folder
@click.option("--prompt", metavar="TEXT", help="text to continue; it may be left out with --state")
@click.option("--max-new-tokens", type=whole(1), default=100, metavar="N", help="tokens to write at most")
@click.option(
    "--temperature", type=real(lambda t: t >= 0, "a number of at least 0"), default=0.8, metavar="T", help="0 is greedy"
)
@click.option("--top-k", type=whole(1), metavar="N", help="draw from the N likeliest tokens (default: all)")
@click.option(
    "--top-p", type=real(lambda p: 0 < p <= 1, "a number above 0 and at most 1"), default=0.95, metavar="P",
    help="draw from the fewest tokens that hold this probability",
)  # fmt: skip
@click.option("--seed", type=int, default=0, metavar="N", help="of the draws")
@checkpoint_step
@click.option("--save-state", type=click.Path(), metavar="FILE", help="keep the state after prompt and new text")
@click.option("--state", type=click.Path(), metavar="FILE", help="continue from a state that --save-state wrote")
def generate(
    run: str, prompt: str | None, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float, seed: int,
    step: int | None, save_state: str | None, state: str | None,
):  # fmt: skip
    """Continue a prompt, with the memory carried along."""
    from titans_pt import evaluation

    evaluation.generate(
        run, prompt, max_new_tokens, temperature, top_k, top_p, seed, step, state_file=state, save_to=save_state
    )
