import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from titans_pt.commands._arguments import FILE, PATH, checkpoint_step, overrides, run_folder, sampling, whole
from titans_pt.errors import UserError

SECTION = "evaluate"
WRITES = "--save-state"


@click.command()
@run_folder
@overrides("evaluation.* settings that override the run's, e.g. evaluation.caching")
@click.option("--system", metavar="TEXT", help="the system message (default: the chat template's own, if it has one)")
@click.option("--max-new-tokens", type=whole(1), default=512, metavar="N", help="maximum number of tokens of an answer")
@sampling
@checkpoint_step
@click.option("--save-state", type=FILE, metavar="FILE", help="write the state after every answer")
@click.option(
    "--state", type=PATH, metavar="FILE",
    help="continue from a state that --save-state wrote, here or in titans generate; it may be the same file",
)  # fmt: skip
def chat(
    run: str, overrides: tuple[str, ...], system: str | None, max_new_tokens: int, sampling: dict[str, Any],
    step: int | None, save_state: Path | None, state: str | None,
):  # fmt: skip
    """Talk with a run's model, one message per line; its state holds the conversation."""
    if system is not None and state is not None:
        raise click.UsageError("--system begins a conversation, and --state continues one; leave one out.")
    from titans_pt import evaluation
    from titans_pt.streaming import Sampling

    evaluation.chat(
        run, _lines(), system, max_new_tokens, Sampling(**sampling), step, state_file=state, save_to=save_state,
        overrides=overrides,
    )  # fmt: skip


def _lines() -> Iterator[str]:
    """The user's messages: lines of standard input that hold text. A terminal shows a prompt, and edits lines."""
    if not sys.stdin.isatty():
        try:
            yield from filter(str.strip, (line.rstrip("\r\n") for line in sys.stdin))
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not {error.encoding.upper()} ({error.reason}); convert it") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and calls earlier ones back
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line
