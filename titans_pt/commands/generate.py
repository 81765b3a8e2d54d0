import re
from pathlib import Path
from typing import Any

import click

from titans_pt.commands._arguments import FILE, PATH, checkpoint_step, overrides, run_folder, sampling, whole

SECTION = "evaluate"
WRITES = "--save-state"


@click.command()
@run_folder
@overrides("evaluation.* settings that override the run's, e.g. evaluation.caching", option="--prompt")
@click.option("--prompt", metavar="TEXT", help="text to continue; optional with --state")
@click.option(
    "--prompt-file", type=PATH, metavar="FILE",
    help="a text file to continue (UTF-8); its final line end is removed; - is standard input",
)  # fmt: skip
@click.option(
    "--prompts", type=PATH, metavar="FILE",
    help="a file with one prompt per line (UTF-8; - is standard input), or a .jsonl file of prompts or chats as for "
    "task=sft; prints one line of JSON per prompt; an empty line starts a document",
)  # fmt: skip
@click.option("--batch", type=whole(1), metavar="N", help="prompts of --prompts per batch (default: 8)")
@click.option(
    "--max-new-tokens", type=whole(0), default=100, metavar="N",
    help="maximum number of new tokens; 0 only reads the prompt, for --save-state",
)  # fmt: skip
@sampling
@checkpoint_step
@click.option("--save-state", type=FILE, metavar="FILE", help="write the state after prompt and new text")
@click.option("--state", type=PATH, metavar="FILE", help="continue from a state that --save-state wrote")
def generate(
    run: str, overrides: tuple[str, ...], prompt: str | None, prompt_file: str | None, prompts: str | None,
    batch: int | None, max_new_tokens: int, sampling: dict[str, Any], step: int | None, save_state: Path | None,
    state: str | None,
):  # fmt: skip
    """Continue a prompt, or many prompts, carrying the memory's state."""
    names = {"--prompt": prompt, "--prompt-file": prompt_file, "--prompts": prompts}
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{given[0]} and {given[1]} exclude each other; leave one out.")
    if batch is not None and prompts is None:
        raise click.UsageError("--batch divides the prompts of --prompts; give those, or leave it out.")
    if prompts is not None and (state or save_state):
        raise click.UsageError("A state has one text: --prompts excludes --state and --save-state.")
    if not max_new_tokens and save_state is None:
        raise click.UsageError("--max-new-tokens 0 only reads the prompt: also give --save-state, or 1 or more.")
    if not prompt and prompt_file is None and prompts is None and state is None:
        raise click.UsageError("Nothing to continue: give --prompt, --prompt-file, --prompts or --state.")
    from titans_pt.tools.files import read_text

    if prompt_file is not None:
        prompt = re.sub("\r?\n\\Z", "", read_text(prompt_file, "--prompt-file"))
    from titans_pt import evaluation
    from titans_pt.evaluation.generation import read_prompts
    from titans_pt.streaming import Sampling

    if prompts is not None:
        every = read_prompts(prompts)
        evaluation.generate_batch(run, every, max_new_tokens, Sampling(**sampling), step, batch or 8, overrides)
        return
    evaluation.generate(
        run, prompt, max_new_tokens, Sampling(**sampling), step, state_file=state, save_to=save_state,
        overrides=overrides,
    )  # fmt: skip
