"""``titans generate``: a run's model continues a prompt, or a state that was saved."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titans_pt.config.data import TOOLS
from titans_pt.data_pipeline import StreamDecoder, Tokenizer
from titans_pt.data_pipeline.tokenizers import ids_within
from titans_pt.data_pipeline.tokenizers.chat import Message, Tool, answer_ends, ids_to_answer, messages_of, tools_of
from titans_pt.errors import UserError
from titans_pt.evaluation.caching import read_prompt, with_caches
from titans_pt.runs.loaded import LoadedRun, load_reading, load_run, save_reading
from titans_pt.streaming import GREEDY, Returning, Sampling, best_device, continuation, continuations, padded
from titans_pt.tools.files import lines_of, read_text


@dataclass(frozen=True)
class Prompt:
    """A text that a model continues, or a chat that it answers.

    expected: the continuation that is known to be right; None: there is none.
    tools: functions that may be called in the chat.
    """

    given: str | tuple[Message, ...]
    expected: str | None = None
    tools: tuple[Tool, ...] = ()

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Ids that the model reads: the beginning of a document.

        Raises:
            UserError: a chat, and the tokenizer has no chat template, or it refuses the messages or does not write the
                tools.
        """
        if isinstance(self.given, str):
            return _opening(tokenizer, self.given)
        return ids_to_answer(tokenizer, self.given, self.tools)


def read_prompts(path: str) -> list[Prompt]:
    """Reads the file of ``--prompts``: one prompt a line, or rows of JSON as task=sft trains on (prompt and completion,
    messages).

    Raises:
        UserError: the file is not UTF-8 or holds no text, or a row has no prompt.
    """
    lines = lines_of(read_text(path, "--prompts"))
    if not path.lower().endswith((".jsonl", ".ndjson", ".json")):
        found = [Prompt(line) for line in lines] if any(lines) else []
    else:
        found = [_row(line, f"--prompts: {path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"--prompts: {path} holds no text; give a prompt on each line")
    return found


def _row(line: str, where: str) -> Prompt:
    """A row of a .jsonl file as a prompt. Its expected text is the completion, or the chat's last message if that is
    the assistant's."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("no object")
        if "messages" in row:
            *before, last = messages_of(row["messages"])
            tools = tools_of(row.get(TOOLS))
            if last["role"] == "assistant":
                return Prompt(tuple(before), last.get("content"), tools)
            return Prompt((*before, last), tools=tools)
        prompt, completion = row["prompt"], row.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str | None):
            raise ValueError("its prompt or its completion is not text")
        return Prompt(prompt, completion)
    except (ValueError, LookupError, RecursionError) as error:
        raise UserError(f"{where}: no row with prompt, or with messages that have role and content ({error!r}); repair "
                        "or remove it") from None  # fmt: skip


_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that end a line for str.splitlines() and editors, and that JSON does not escape."""


def generate(
    run_dir: str | Path,
    prompt: str | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling = GREEDY,
    step: int | None = None,
    state_file: str | Path | None = None,
    save_to: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """Continues ``prompt`` with a run's model: text to stdout as it comes, tokens/s to stderr.

    Args:
        prompt: may be left out with ``state_file``, to continue where it ended.
        max_new_tokens: the most tokens to generate; an end-of-text token ends it earlier. With ``save_to`` it may be 0:
            the prompt is read and kept.
        sampling: how tokens are drawn.
        step: the checkpoint; None is the newest.
        state_file: the ``save_to`` of an earlier call; all that call read and wrote comes before the prompt.
        save_to: a file for the state after prompt and new text. It may be ``state_file``.
        overrides: ``evaluation.KEY=VALUE`` settings over the run's, such as evaluation.caching.

    Returns:
        the new text.

    Raises:
        UserError: an argument out of range, a state of another model or checkpoint, or an error that ``load_run`` finds
            in the run.
    """
    sampling.check(max_new_tokens or int(save_to is not None))
    run = opened(run_dir, step, overrides)
    _check(bool(prompt) or state_file is not None, "prompt", prompt, "some text, or none with a saved state")
    # A saved state is in the middle of a document.
    ids = (_opening if state_file is None else ids_within)(run.tokenizer, prompt or "")

    logits, state, unfinished = (None, None, b"") if state_file is None else load_reading(run, state_file)
    began = time.perf_counter()
    if ids:
        logits, state = read_prompt(
            run.model, torch.tensor([ids]), run.config.evaluation.prefill_tokens, state, last=run.read_last
        )
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
    assert logits is not None  # of the state, or of ids: a document begins with at least one id
    read = time.perf_counter()
    tokens = Returning(
        continuation(
            run.model, logits, state, max_new_tokens, {run.tokenizer.eos_id}, sampling.chooser(),
            read_last=save_to is not None,
        )
    )  # fmt: skip
    decoder = StreamDecoder(run.tokenizer, continues=True, unfinished=b"" if ids else unfinished)
    text, count = print_text(decoder, tokens, whole=save_to is None)
    wrote = time.perf_counter()
    prompt_rate = f" at {len(ids) / (read - began):.1f} tokens/s" if ids else ""
    new_rate = f"{count} new tokens at {count / (wrote - read):.1f} tokens/s"
    print(f"step {run.step}: {len(ids)} prompt tokens{prompt_rate}, {new_rate}", file=sys.stderr)
    if save_to is not None:
        save_reading(run, *tokens.value, decoder.unfinished, save_to)
        print(f"state: {save_to}", file=sys.stderr)
    return text


def generate_batch(
    run_dir: str | Path,
    prompts: Sequence[str | Prompt],
    max_new_tokens: int = 128,
    sampling: Sampling = GREEDY,
    step: int | None = None,
    batch: int = 8,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Continue each of ``prompts``, ``batch`` of them side by side.

    For each prompt, in order, stdout gets a line of JSON with the prompt, its number of tokens, the new text and its
    number of tokens, and the expected text if it has one; stderr gets tokens/s, and how many texts are as expected but
    for white space around them. Each prompt is continued as if it were alone. Prompt i, counted from 0, has
    draws of its own, with the seed ``sampling.seed`` + i. An empty prompt is the beginning of a document.

    Returns:
        the new texts.

    Raises:
        UserError: as :func:`generate`.
    """
    sampling.check(max_new_tokens)
    _check(batch >= 1, "batch", batch, "at least 1")
    run = opened(run_dir, step, overrides)
    every = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    asked = [prompt.ids(run.tokenizer) for prompt in every]
    chats = any(not isinstance(prompt.given, str) for prompt in every)
    ends = answer_ends(run.tokenizer) if chats else [run.tokenizer.eos_id]
    texts: list[str] = []
    written, began = 0, time.perf_counter()
    for first in range(0, len(asked), batch):
        rows = range(first, min(first + batch, len(asked)))
        ids, reset = padded([asked[row] for row in rows])
        logits, state = read_prompt(run.model, ids, run.config.evaluation.prefill_tokens, None, reset, run.read_last)
        choose = [sampling.chooser(row) for row in rows]
        found = continuations(run.model, logits, state, max_new_tokens, ends, choose)
        for row, new in zip(rows, found, strict=True):
            decoder = StreamDecoder(run.tokenizer, continues=True)
            texts.append("".join(map(decoder.push, new)) + decoder.finish())
            written += len(new)
            line: dict[str, Any] = {"prompt": every[row].given, "prompt_tokens": len(asked[row])}
            line |= {"text": texts[-1], "tokens": len(new)}
            line |= {} if every[row].expected is None else {"expected": every[row].expected}
            print(_one_line(line), flush=True)
    read, seconds = sum(map(len, asked)), time.perf_counter() - began
    print(
        f"step {run.step}: {len(asked)} prompts of {read} tokens, {written} new tokens: "
        f"{(read + written) / seconds:.1f} tokens/s",
        file=sys.stderr,
    )
    known = [(prompt.expected, text) for prompt, text in zip(every, texts, strict=True) if prompt.expected is not None]
    if known:
        equal = sum(expected.strip() == text.strip() for expected, text in known)
        print(f"{equal} of {len(known)} texts are as expected", file=sys.stderr)
    return texts


def opened(run_dir: str | Path, step: int | None, overrides: Sequence[str]) -> LoadedRun:
    """A run with its read caches, on the best device.

    Raises:
        UserError: an override of anything but evaluation, or as ``load_run`` and ``with_caches``.
    """
    for override in overrides:
        if not override.startswith("evaluation."):
            raise UserError(f"override {override!r}: only evaluation.KEY=VALUE can be set here; the rest is the run's")
    return with_caches(load_run(run_dir, step=step, device=best_device(), overrides=overrides))


def _opening(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt that begins a document; of an empty prompt, the ids before a document's text."""
    return tokenizer.document(prompt) or tokenizer.before_text


def _one_line(entries: dict) -> str:
    """JSON on one line for every reader, in characters that standard output can encode."""
    text = json.dumps(entries, ensure_ascii=False).translate(_LINE_ENDS)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(entries)
    return text


def print_text(decoder: StreamDecoder, tokens: Iterable[int], whole: bool) -> tuple[str, int]:
    """Print the text of ``tokens`` piece by piece as they come; return the text and its number of tokens.

    Args:
        whole: whether no text follows; a character that was cut then shows as U+FFFD.
    """
    pieces = []
    for token in tokens:
        pieces.append(decoder.push(token))
        print(pieces[-1], end="", flush=True)
    pieces.append(decoder.finish() if whole else "")
    print(pieces[-1], flush=True)
    return "".join(pieces), len(pieces) - 1


def _check(ok: bool, name: str, given: Any, allowed: str) -> None:
    if not ok:
        raise UserError(f"{name}: given {given!r}; allowed: {allowed}")
