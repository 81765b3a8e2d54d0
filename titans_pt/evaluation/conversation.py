"""``titans chat``: a conversation with a run's model, whose state holds all that was said."""

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from titans_pt.data_pipeline import StreamDecoder
from titans_pt.data_pipeline.tokenizers.chat import answer_ends, message_ids
from titans_pt.evaluation.caching import read_prompt
from titans_pt.evaluation.generation import opened, print_text
from titans_pt.runs.loaded import load_reading, save_reading
from titans_pt.streaming import GREEDY, Returning, Sampling, continuation


def chat(
    run_dir: str | Path,
    messages: Iterable[str],
    system: str | None = None,
    max_new_tokens: int = 512,
    sampling: Sampling = GREEDY,
    step: int | None = None,
    state_file: str | Path | None = None,
    save_to: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Answers each of ``messages`` as it comes: text to stdout, tokens/s to stderr at the end.

    The tokenizer's chat template writes the conversation. Each token is read once, and the state goes on from message
    to message. A memory's state has the same size after any number of them.

    Args:
        messages: what the user says.
        system: the system message; None: the template's own, if it has one.
        max_new_tokens: the most tokens of an answer.
        state_file: continue the conversation whose state this file holds, or one about the text that ``titans generate
            --save-state`` read.
        save_to: a file for the state, written after each answer. It may be ``state_file``.

    The other arguments are those of :func:`titans_pt.evaluation.generate`.

    Returns:
        the answers.

    Raises:
        UserError: as :func:`titans_pt.evaluation.generate`; the tokenizer has no chat template, or it refuses the
            messages.
    """
    sampling.check(max_new_tokens)
    run = opened(run_dir, step, overrides)
    state = None if state_file is None else load_reading(run, state_file)[1]
    message_ids(run.tokenizer, "", system)  # a template that cannot serve is refused before the first message
    ends, choose = answer_ends(run.tokenizer), sampling.chooser()
    answers, read, wrote, seconds = [], 0, 0, 0.0
    for message in messages:
        began = time.perf_counter()
        ids = message_ids(run.tokenizer, message, system, first=state is None)
        logits, state = read_prompt(
            run.model, torch.tensor([ids]), run.config.evaluation.prefill_tokens, state, last=run.read_last
        )
        tokens = Returning(continuation(run.model, logits, state, max_new_tokens, ends, choose, read_last=True))
        decoder = StreamDecoder(run.tokenizer, continues=True)
        answer, count = print_text(decoder, tokens, whole=True)
        logits, state = tokens.value
        if save_to is not None:
            save_reading(run, logits, state, b"", save_to)
        answers.append(answer)
        read, wrote, seconds = read + len(ids), wrote + count, seconds + time.perf_counter() - began
    rate = f": {(read + wrote) / seconds:.1f} tokens/s" if answers else ""
    print(f"step {run.step}: {read} tokens read, {wrote} written in {len(answers)} answers{rate}", file=sys.stderr)
    if save_to is not None and answers:
        print(f"state: {save_to}", file=sys.stderr)
    return answers
