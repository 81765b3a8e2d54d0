"""Reads text of any length through a model in constant memory, and generates tokens.

Every function here takes a model called as ``model(ids, state, last_only=...) -> (logits, state)`` with
ids (B, T) int64 and logits (B, T, V), or (B, 1, V) with ``last_only=True``. Those that generate put token plans on it
(titans_pt.token_plans).
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.errors import UserError
from titans_pt.layers.state import fork
from titans_pt.token_plans import put_on


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's tensors; CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def best_device(local_rank: int = 0) -> str:
    """The CUDA device of a local rank (shared if there are fewer than ranks), or "cpu" without any."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{local_rank % count}" if count else "cpu"


def padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads prompts of different lengths on the left to one batch.

    Padding is read as a document of its own before the prompt, of which a model sees nothing once the prompt
    begins: its memory, windows and convolutions start there.

    Returns:
        ids (B, T) int64, and reset (B, T) bool, True where a prompt begins; :func:`prefill` takes both.

    Raises:
        ValueError: a prompt without tokens, or none.
    """
    if not prompts or not all(prompts):
        raise ValueError("prompts: each must have a token at least, and there must be one")
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    begin = torch.tensor([longest - len(prompt) for prompt in prompts])
    return ids, torch.arange(longest) == begin[:, None]


@torch.no_grad()
def prefill(
    model: nn.Module, ids: Tensor, chunk_tokens: int, state: Any = None, reset: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Streams ``ids`` through the model in pieces, with its state carried along.

    Memory does not grow with T: only a piece is on the model's device, and only the last token's logits are
    computed. (The state of a full-attention mixer grows; that is the mixer's own.)

    Args:
        ids: (B, T) integers on any device, T >= 1.
        chunk_tokens: tokens of a piece; it changes speed and memory, not the result.
        state: what an earlier call returned, to continue from; None: start at the beginning.
        reset: bool (B, T), True where a document starts: nothing before it is seen from there on. None: nowhere.

    Returns:
        logits of the last token (B, V), and the state after it.
    """
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(f"ids: shape {tuple(ids.shape)}; needs (B, T) with T >= 1")
    device = device_of(model)
    starts = repeat(None) if reset is None else reset.split(chunk_tokens, dim=1)
    for piece, start in zip(ids.split(chunk_tokens, dim=1), starts, strict=False):
        # Where nothing starts the faster ways are open.
        more = {} if start is None or not bool(start.any()) else {"reset": start}
        logits, state = model(piece.to(device, torch.int64), state, last_only=True, **more)
    return logits[:, -1], state


@torch.no_grad()
def continuation_logits(model: nn.Module, last_logits: Tensor, state: Any, ids: list[int]) -> Tensor:
    """The logits (n, V) from which each of n given tokens after a prompt would be chosen; ``state`` is left as it is.

    Args:
        last_logits: (1, V), and the state after them, as :func:`prefill` returns.
    """
    if len(ids) <= 1:
        return last_logits[: len(ids)]
    put_on(model)
    more, _ = model(torch.tensor([ids[:-1]], device=last_logits.device), fork(state))
    return torch.cat([last_logits, more[0]])


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
        last_logits: (1, V), and the state after them, as :func:`prefill` returns.
        choose: logits (V,) -> id.
        read_last: put the last id through the model too, which only a further continuation needs.

    Returns:
        (as a generator does) the last logits and the state after them.
    """
    put_on(model)
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


@torch.no_grad()
def continuations(
    model: nn.Module,
    last_logits: Tensor,
    state: Any,
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Sequence[Callable[[Tensor], int]],
) -> list[list[int]]:
    """:func:`continuation` of each row of a batch: up to ``max_new_tokens`` ids, ending before one of ``stop_ids``.

    Args:
        last_logits: (B, V), and the state after them, as :func:`prefill` returns.
        choose: for each row, logits (V,) -> id.
    """
    put_on(model)
    found: list[list[int]] = [[] for _ in choose]
    going = list(range(len(choose)))
    last = [0] * len(choose)  # what a row that has ended reads matters to nobody
    for left in range(max_new_tokens, 0, -1):
        for row in list(going):
            last[row] = choose[row](last_logits[row])
            if last[row] in stop_ids:
                going.remove(row)
            else:
                found[row].append(last[row])
        if not going or left == 1:
            break
        logits, state = model(torch.tensor(last, device=device_of(model))[:, None], state, last_only=True)
        last_logits = logits[:, -1]
    return found


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
    choose = chooser(temperature, top_k, top_p, seed)
    return continuation(model, last_logits, state, max_new_tokens, stop_ids, choose, read_last)


def check_draws(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float):
    """
    Raises:
        UserError: an argument of :func:`sample` out of range.
    """
    for ok, name, given, allowed in (
        (max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1"),
        (temperature >= 0.0, "temperature", temperature, "at least 0 (0 is greedy)"),
        (top_k is None or top_k >= 1, "top_k", top_k, "at least 1"),
        (0.0 < top_p <= 1.0, "top_p", top_p, "above 0, at most 1"),
    ):
        if not ok:
            raise UserError(f"{name}: given {given!r}; allowed: {allowed}")


def chooser(temperature: float, top_k: int | None, top_p: float, seed: int) -> Callable[[Tensor], int]:
    """logits (V,) -> id, by :func:`draw`; the most likely one at temperature 0."""
    if temperature == 0.0:
        return most_likely
    generator = torch.Generator().manual_seed(seed)
    return partial(draw, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
