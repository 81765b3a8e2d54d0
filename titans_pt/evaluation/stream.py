"""A context of any length through a model in constant memory, and tokens out of it.

Every function here takes a model called as ``model(ids, state, last_only=...) -> (logits, state)`` with
ids (B, T) int64 and logits (B, T, V), or (B, 1, V) with ``last_only=True``.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline import StreamDecoder
from titans_pt.errors import UserError
from titans_pt.run import load_run


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
) -> Iterator[int]:
    """Yields up to ``max_new_tokens`` ids one by one, each as soon as it is known; ends before one of ``stop_ids``.

    Args:
        last_logits: (1, V), and the state behind them, as :func:`prefill` returns.
        choose: logits (V,) -> id.
    """
    device = device_of(model)
    for left in range(max_new_tokens, 0, -1):
        token = choose(last_logits[0])
        if token in stop_ids:
            return
        yield token
        if left > 1:
            logits, state = model(torch.tensor([[token]], device=device), state, last_only=True)
            last_logits = logits[:, -1]


def most_likely(logits: Tensor) -> int:
    return int(logits.argmax())


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from softmax(logits / temperature), cut to the smallest set of ids that holds ``top_p`` of it.

    The draw is made on the CPU, so that a seed means the same on every device.
    """
    p, order = torch.softmax(logits.double().cpu() / temperature, dim=0).sort(descending=True, stable=True)
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
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """:func:`continuation` with ids drawn by :func:`draw`; temperature 0 is :func:`greedy`."""
    if temperature == 0.0:
        return greedy(model, last_logits, state, max_new_tokens, stop_ids)
    choose = partial(draw, temperature=temperature, top_p=top_p, generator=torch.Generator().manual_seed(seed))
    return continuation(model, last_logits, state, max_new_tokens, stop_ids, choose)


def generate(
    run_dir: str | Path,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Continues ``prompt`` with a run's model: text to stdout as it comes, tokens/s to stderr.

    Args:
        max_new_tokens: at most so many; an end-of-text token ends it earlier.
        temperature: 0 takes the most likely token, 1 draws from the model's distribution.
        top_p: draws only from the smallest set of tokens that holds this much probability.
        step: the checkpoint; None is the newest.

    Returns:
        the new text.

    Raises:
        UserError: an argument out of range, or what ``load_run`` finds wrong with the run.
    """
    _check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
    _check(temperature >= 0.0, "temperature", temperature, "at least 0 (0 is greedy)")
    _check(0.0 < top_p <= 1.0, "top_p", top_p, "above 0, at most 1")
    run = load_run(run_dir, step=step, device=best_device())
    ids = run.tokenizer.encode(prompt)
    _check(bool(ids), "prompt", prompt, "some text")

    began = time.perf_counter()
    logits, state = prefill(run.model, torch.tensor([ids]), run.config.evaluation.prefill_tokens)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    read = time.perf_counter()
    decoder, pieces, count = StreamDecoder(run.tokenizer, continues=True), [], 0
    for token in sample(run.model, logits, state, max_new_tokens, {run.tokenizer.eos_id}, temperature, top_p, seed):
        pieces.append(decoder.push(token))
        count += 1
        print(pieces[-1], end="", flush=True)
    pieces.append(decoder.finish())
    print(pieces[-1], flush=True)
    wrote = time.perf_counter()
    print(
        f"step {run.step}: {len(ids)} prompt tokens at {len(ids) / (read - began):.1f} tokens/s, "
        f"{count} new tokens at {count / (wrote - read):.1f} tokens/s",
        file=sys.stderr,
    )
    return "".join(pieces)


def _check(ok: bool, name: str, given: Any, allowed: str) -> None:
    if not ok:
        raise UserError(f"{name}: given {given!r}; allowed: {allowed}")
