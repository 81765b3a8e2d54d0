"""A context of any length through a model in constant memory, and tokens out of it.

Every function here takes a model called as ``model(ids, state, last_only=...) -> (logits, state)`` with
ids (B, T) int64 and logits (B, T, V), or (B, 1, V) with ``last_only=True``.
"""

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.config import config_hash
from titans_pt.data_pipeline import StreamDecoder
from titans_pt.errors import UserError
from titans_pt.run import LoadedRun, load_run
from titans_pt.state import load_state, read_about, save_state


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors are; CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def best_device(local_rank: int = 0) -> str:
    """A CUDA device, one for each local rank as far as they go, or "cpu" when there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{local_rank % count}" if count else "cpu"


@torch.no_grad()
def prefill(model: nn.Module, ids: Tensor, chunk_tokens: int, state: Any = None) -> tuple[Tensor, Any]:
    """Streams ``ids`` through the model in pieces, its state carried.

    Memory does not grow with T: only a piece is on the model's device, and only the last token's logits are
    computed. (The state of a full-attention mixer grows; that is the mixer's own.)

    Args:
        ids: (B, T) integers on any device, T >= 1.
        chunk_tokens: tokens of a piece; it changes speed and memory, not the result.
        state: what an earlier call returned, to go on from; None begins anew.

    Returns:
        logits of the last token (B, V), and the state behind it.
    """
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(f"ids: shape {tuple(ids.shape)}; needs (B, T) with T >= 1")
    device = device_of(model)
    for piece in ids.split(chunk_tokens, dim=1):
        logits, state = model(piece.to(device, torch.int64), state, last_only=True)
    return logits[:, -1], state


@torch.no_grad()
def continuation(
    model: nn.Module,
    last_logits: Tensor,
    state: Any,
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Callable[[Tensor], int],
    read_last: bool = False,
) -> Generator[int, None, tuple[Tensor, Any]]:
    """Yields up to ``max_new_tokens`` ids one by one, each as soon as it is known; ends before one of ``stop_ids``.

    Args:
        last_logits: (1, V), and the state behind them, as :func:`prefill` returns.
        choose: logits (V,) -> id.
        read_last: put the last id through the model too, which only a further continuation needs.

    Returns:
        (as a generator does) the last logits and the state behind them.
    """
    device = device_of(model)
    for left in range(max_new_tokens, 0, -1):
        token = choose(last_logits[0])
        if token in stop_ids:
            break
        yield token
        if left > 1 or read_last:
            logits, state = model(torch.tensor([[token]], device=device), state, last_only=True)
            last_logits = logits[:, -1]
    return last_logits, state


def most_likely(logits: Tensor) -> int:
    return int(logits.argmax())


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> int:
    """One id from softmax(logits / temperature), cut to ``top_k`` ids, then to the fewest that hold ``top_p`` of these.

    The draw is made on the CPU, so that a seed means the same on every device.
    """
    p, order = torch.softmax(logits.double().cpu() / temperature, dim=0).sort(descending=True, stable=True)
    p = p[:top_k] / p[:top_k].sum()
    p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)  # the most likely id always stays
    return int(order[torch.multinomial(p, 1, generator=generator)])


def greedy(
    model: nn.Module, last_logits: Tensor, state: Any, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """:func:`continuation` with the most likely id at each place."""
    return continuation(model, last_logits, state, max_new_tokens, stop_ids, most_likely)


def sample(
    model: nn.Module,
    last_logits: Tensor,
    state: Any,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    read_last: bool = False,
) -> Generator[int, None, tuple[Tensor, Any]]:
    """:func:`continuation` with ids drawn by :func:`draw`; temperature 0 is :func:`greedy`."""
    choose = most_likely
    if temperature > 0.0:
        generator = torch.Generator().manual_seed(seed)
        choose = partial(draw, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    return continuation(model, last_logits, state, max_new_tokens, stop_ids, choose, read_last)


def generate(
    run_dir: str | Path,
    prompt: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    state_file: str | Path | None = None,
    save_to: str | Path | None = None,
) -> str:
    """Continues ``prompt`` with a run's model: text to stdout as it comes, tokens/s to stderr.

    Args:
        prompt: may be missing when ``state_file`` is given, to go on writing where it ended.
        max_new_tokens: at most so many; an end-of-text token ends it earlier.
        temperature: 0 takes the most likely token, 1 draws from the model's distribution.
        top_k: draws only from so many most likely tokens; None is all.
        top_p: draws only from the smallest set of tokens that holds this much probability.
        step: the checkpoint; None is the newest.
        state_file: all that ``save_to`` kept of an earlier call comes before the prompt.
        save_to: a file for the state behind prompt and new text. It may be ``state_file``.

    Returns:
        the new text.

    Raises:
        UserError: an argument out of range, a state of another model or checkpoint, or what ``load_run`` finds
            wrong with the run.
    """
    _check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
    _check(temperature >= 0.0, "temperature", temperature, "at least 0 (0 is greedy)")
    _check(top_k is None or top_k >= 1, "top_k", top_k, "at least 1")
    _check(0.0 < top_p <= 1.0, "top_p", top_p, "above 0, at most 1")
    run = load_run(run_dir, step=step, device=best_device())
    ids = run.tokenizer.encode(prompt or "")
    _check(bool(ids) or state_file is not None, "prompt", prompt, "some text, or none with a saved state")

    logits, state = (None, None) if state_file is None else _read_saved(state_file, run)
    began = time.perf_counter()
    if ids:
        logits, state = prefill(run.model, torch.tensor([ids]), run.config.evaluation.prefill_tokens, state)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
    read = time.perf_counter()
    decoder, pieces = StreamDecoder(run.tokenizer, continues=True), []
    tokens = _Returning(
        sample(
            run.model, logits, state, max_new_tokens, {run.tokenizer.eos_id}, temperature, top_k, top_p, seed,
            read_last=save_to is not None,
        )
    )  # fmt: skip
    for token in tokens:
        pieces.append(decoder.push(token))
        print(pieces[-1], end="", flush=True)
    count = len(pieces)
    pieces.append(decoder.finish())
    print(pieces[-1], flush=True)
    wrote = time.perf_counter()
    prompt_rate = f" at {len(ids) / (read - began):.1f} tokens/s" if ids else ""
    print(
        f"step {run.step}: {len(ids)} prompt tokens{prompt_rate}, "
        f"{count} new tokens at {count / (wrote - read):.1f} tokens/s",
        file=sys.stderr,
    )
    if save_to is not None:
        save_state(tokens.value, save_to, _about(run))
        print(f"state: {save_to}", file=sys.stderr)
    return "".join(pieces)


class _Returning:
    """Goes through a generator and keeps what it returns in ``value``."""

    def __init__(self, generator: Generator):
        self.generator, self.value = generator, None

    def __iter__(self) -> Iterator:
        self.value = yield from self.generator


def _about(run: LoadedRun) -> dict[str, str]:
    """What a saved state is good for: this model with these weights."""
    return {"kind": "generation", "model": config_hash(run.config.model), "checkpoint": run.checkpoint_hash}


def _read_saved(path: str | Path, run: LoadedRun) -> tuple[Tensor, Any]:
    """Last logits (1, V) and state that :func:`generate` saved with the same weights."""
    about, expected = read_about(path), _about(run)
    if about.get("kind") != expected["kind"]:
        raise UserError(f"{path}: a state, but not one that titans generate --save-state wrote; write one with it")
    # Equal checkpoints are equal models, although a version with more settings hashes them differently.
    if about["checkpoint"] != expected["checkpoint"]:
        if about["model"] != expected["model"]:
            raise UserError(f"{path}: saved by a model of other settings; name the run that it was saved with")
        raise UserError(
            f"{path}: saved with another checkpoint than step {run.step} of {run.folder.path}; "
            "name that one with --checkpoint STEP, or that run"
        )
    return load_state(path, device_of(run.model))


def _check(ok: bool, name: str, given: Any, allowed: str) -> None:
    if not ok:
        raise UserError(f"{name}: given {given!r}; allowed: {allowed}")
