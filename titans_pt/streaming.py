"""Reads text of any length through a model in constant memory, and generates tokens.

Every function here takes a model called as ``model(ids, state, last_only=...) -> (logits, state)`` with
ids (B, T) int64 and logits (B, T, V), or (B, 1, V) with ``last_only=True``. Functions that generate tokens put token
plans on the model (titans_pt.token_plans).
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from titans_pt.errors import UserError
from titans_pt.layers.state import fork
from titans_pt.token_plans import put_on

T = TypeVar("T")


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's tensors; CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def best_device(local_rank: int = 0) -> str:
    """The CUDA device of a local rank (shared if there are fewer GPUs than ranks), or "cpu" without a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{local_rank % count}" if count else "cpu"


def padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads prompts of different lengths on the left, to form one batch.

    The padding is read as a separate document before the prompt. The model sees nothing of it once the prompt begins,
    because its memory, windows and convolutions restart there.

    Returns:
        ids (B, T) int64, and reset (B, T) bool, True where a prompt begins; :func:`prefill` takes both.

    Raises:
        ValueError: there are no prompts, or one has no tokens.
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

    Memory use does not grow with T: only one piece is on the model's device, and only the last token's logits are
    computed. (The state of a full-attention mixer does grow.)

    Args:
        ids: (B, T) integers on any device, T >= 1.
        chunk_tokens: tokens per piece; changes speed and memory use, not the result.
        state: state from an earlier call, to continue from; None: start at the beginning.
        reset: bool (B, T), True where a document starts; later tokens see nothing before it. None: nowhere.

    Returns:
        logits of the last token (B, V), and the state after this token.
    """
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(f"ids: shape {tuple(ids.shape)}; needs (B, T) with T >= 1")
    if reset is not None and reset.shape != ids.shape:
        raise ValueError(f"reset: given shape {tuple(reset.shape)}; must be that of ids, {tuple(ids.shape)}")
    device = device_of(model)
    starts = repeat(None) if reset is None else reset.split(chunk_tokens, dim=1)
    for piece, start in zip(ids.split(chunk_tokens, dim=1), starts, strict=False):
        # Pieces in which no document starts can take faster paths.
        more = {} if start is None or not bool(start.any()) else {"reset": start}
        logits, state = model(piece.to(device, torch.int64), state, last_only=True, **more)
    return logits[:, -1], state


@torch.no_grad()
def continuation_logits(model: nn.Module, last_logits: Tensor, state: Any, ids: list[int]) -> Tensor:
    """The logits (n, V) that predict each of n given tokens after a prompt; ``state`` is not changed.

    Args:
        last_logits, state: logits (1, V) of the prompt's last token and the state after it, from :func:`prefill`.
        ids: the n tokens.
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
        last_logits, state: logits (1, V) of the last token and the state after it, from :func:`prefill`.
        choose: function from logits (V,) to an id.
        read_last: also feed the last id to the model, which only a further continuation needs.

    Returns:
        The last logits and the state after them, as the generator's return value.
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
    """:func:`continuation` for each row of a batch: up to ``max_new_tokens`` ids, ending before one of ``stop_ids``.

    Args:
        last_logits, state: logits (B, V) of the last tokens and the state after them, from :func:`prefill`.
        choose: for each row, a function from logits (V,) to an id.
    """
    put_on(model)
    found: list[list[int]] = [[] for _ in choose]
    going = list(range(len(choose)))
    last = [0] * len(choose)  # a row that has ended still reads tokens, but they do not matter
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
    """Draws an id from softmax(logits / temperature), cut to ``top_k`` ids, then to the fewest with ``top_p`` of these.

    It draws on the CPU, so that a seed gives the same ids on every device.
    """
    logits = logits.double().cpu()
    # Relative to the largest logit: divided by a tiny temperature, all others become -inf, and none NaN.
    p, order = torch.softmax((logits - logits.max()) / temperature, dim=0).sort(descending=True, stable=True)
    p = p[:top_k] / p[:top_k].sum()
    p = torch.where(p.cumsum(0) - p < top_p, p, 0.0)  # always keeps the most likely id
    return int(order[torch.multinomial(p, 1, generator=generator)])


def greedy(
    model: nn.Module, last_logits: Tensor, state: Any, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """:func:`continuation` with the most likely id at each place."""
    return continuation(model, last_logits, state, max_new_tokens, stop_ids, most_likely)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits; by default the most likely one is taken. See :func:`draw`."""

    temperature: float = 0.0
    """0 takes the most likely token, 1 draws from the model's distribution."""
    top_k: int | None = None
    """Draw only from this many most likely tokens; None: from all."""
    top_p: float = 1.0
    """Draw only from the smallest set of tokens that holds this much probability."""
    seed: int = 0
    """Random seed of the draws."""

    def check(self, max_new_tokens: int):
        """
        Raises:
            UserError: one of these numbers, or ``max_new_tokens``, is out of range or no number.
        """
        top_k = 1 if self.top_k is None else self.top_k
        for kind, name, given, ok, allowed in (
            (Integral, "max_new_tokens", max_new_tokens, lambda n: n >= 1, "a whole number, at least 1"),
            (Real, "temperature", self.temperature, lambda t: t >= 0.0, "a number, at least 0 (0 is greedy)"),
            (Integral, "top_k", top_k, lambda k: k >= 1, "a whole number, at least 1"),
            (Real, "top_p", self.top_p, lambda p: 0.0 < p <= 1.0, "a number above 0, at most 1"),
            (Integral, "seed", self.seed, lambda n: -(2**63) <= n < 2**63, "a whole number of 64 bits"),
        ):
            if not isinstance(given, kind) or not ok(given):
                raise UserError(f"{name}: given {given!r}; allowed: {allowed}")

    def chooser(self, row: int = 0) -> Callable[[Tensor], int]:
        """A function from logits (V,) to an id; each ``row`` of a batch has draws of its own, with the seed + row."""
        if self.temperature == 0.0:
            return most_likely
        generator = torch.Generator().manual_seed(self.seed + row)
        return partial(draw, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, generator=generator)


GREEDY = Sampling()


class Returning(Generic[T]):
    """Iterate over a generator of ids and keep its return value."""

    value: T
    """Set at the end of the generator."""

    def __init__(self, generator: Generator[int, None, T]):
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        self.value = yield from self.generator
