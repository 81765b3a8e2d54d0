"""``titans demo``: recall of eight needles by a memory and by a window, after more and more noise.

The model comes with the package (titans_pt/pretrained/needles-lmm). It reads one stream in constant memory: needles in
noise as in its training, then more noise. After 2,048 tokens, 4,096 and so on, a copy of its state is asked for the
needles. For comparison, the same model answers with only the last 2,048 tokens of the stream in view, the length of the
longest sample in its training.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from titans_pt.errors import UserError
from titans_pt.layers.state import state_bytes
from titans_pt.library.titan import PRETRAINED
from titans_pt.runs.loaded import LoadedRun, load_run
from titans_pt.streaming import best_device, device_of, prefill
from titans_pt.tasks.answers import VALIDATION_SEED, answered
from titans_pt.tasks.needles import NeedlesInNoise
from titans_pt.tools.files import check_room
from titans_pt.tools.plots import figure_format, length_axis, new_figure, own_style, save_figure

MODEL = "needles-lmm"
NEEDLES, WINDOW = 8, 2048
"""Values of the model's training: needles in a sample, and tokens of the longest sample."""


@dataclass(frozen=True)
class Asked:
    """Numbers of needles known after reading ``tokens`` tokens, the needles included."""

    tokens: int
    memory: int
    window: int
    """Needles known with only the last WINDOW tokens in view."""


def demo(tokens: int, seed: int = 0, picture: Path | None = None) -> list[Asked]:
    """Read the stream, print a table and draw a picture.

    Args:
        tokens: length of the stream, at least WINDOW. Its first WINDOW tokens hold the needles.
        seed: random seed of the needles and the noise.
        picture: file to draw; None: no picture.

    Returns:
        the answers after WINDOW tokens, after each doubling, and after ``tokens``.

    Raises:
        UserError: ``tokens`` is too small, or the picture cannot be written.
    """
    if tokens < WINDOW:
        raise UserError(f"tokens: given {tokens}; allowed: at least {WINDOW}, which hold the needles")
    if picture is not None:
        figure_format(picture)
        check_room(picture, "--out")
    run = load_run(PRETRAINED / MODEL, device=best_device())
    began = time.perf_counter()
    with tqdm(total=tokens, unit=" tokens", unit_scale=True, desc="reading", leave=False) as bar:
        asked = list(_ask(run, tokens, seed, bar.update))
    print(_table(asked, sum(p.numel() for p in run.model.parameters())))
    print(
        f"\n{time.perf_counter() - began:.1f} s; the memory's state has "
        f"{state_bytes(run.model(torch.zeros(1, 1, dtype=torch.int64, device=device_of(run.model)))[1]):,} bytes"
    )
    if picture is not None:
        print(f"picture: {_draw(asked, picture)}")
    return asked


@torch.no_grad()
def _ask(run: LoadedRun, tokens: int, seed: int, done: Callable[[int], object]) -> Iterator[Asked]:
    sample = NeedlesInNoise(run.config.model.vocab_size, WINDOW, NEEDLES, run.config.section("needles")["held_out"])
    ids, places = (torch.from_numpy(part)[None] for part in sample.sample(VALIDATION_SEED, seed))
    first, questions = ids.split([WINDOW - sample.tail, sample.tail], dim=1)
    places, device, noise = places - first.shape[1], device_of(run.model), np.random.default_rng(seed)

    def right(state: Any) -> int:
        return int(answered(run.model, questions.to(device), places.to(device), state).sum())

    state: Any = None
    read, last = 0, first[:, :0]
    for stop in _stops(tokens):
        while (left := stop - sample.tail - read) > 0:
            drawn = noise.choice(sample.noise, (1, min(WINDOW, left)))
            more = first if state is None else torch.from_numpy(drawn)
            _, state = prefill(run.model, more, WINDOW, state)
            read, last = read + more.shape[1], torch.cat([last, more], 1)[:, -WINDOW:]
            done(more.shape[1])
        yield Asked(stop, right(state), right(prefill(run.model, last[:, sample.tail - WINDOW :], WINDOW)[1]))
    done(sample.tail)


def _stops(tokens: int) -> list[int]:
    """Lengths at which the needles are asked for: WINDOW, its doublings below ``tokens``, and ``tokens``."""
    stops = [WINDOW]
    while 2 * stops[-1] < tokens:
        stops.append(2 * stops[-1])
    return stops if tokens == WINDOW else [*stops, tokens]


def _table(asked: list[Asked], parameters: int) -> str:
    lines = [
        f"{NEEDLES} needles, a key and its value each, in the first {WINDOW:,} tokens; then noise.",
        f"Right answers of an LMM of {parameters:,} parameters:",
        "",
        f"{'tokens read':>12}{'its memory':>16}{f'the last {WINDOW:,} tokens alone':>34}",
    ]
    for one in asked:
        lines.append(f"{one.tokens:>12,}{f'{one.memory} of {NEEDLES}':>16}{f'{one.window} of {NEEDLES}':>34}")
    return "\n".join(lines)


@own_style()
def _draw(asked: list[Asked], path: Path) -> Path:
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    tokens = [one.tokens for one in asked]
    axes.plot(tokens, [one.memory for one in asked], marker="o", label="its memory, the whole stream read")
    axes.plot(tokens, [one.window for one in asked], marker="s", label=f"a window: the last {WINDOW:,} tokens alone")
    length_axis(axes)
    axes.set_xlabel("tokens read since the stream began")
    axes.set_ylabel(f"needles known, of {NEEDLES}")
    axes.set_ylim(-0.4, NEEDLES + 0.4)
    axes.set_title(f"{NEEDLES} needles in the first {WINDOW:,} tokens, then noise")
    axes.legend(loc="center right")
    return save_figure(figure, path)
