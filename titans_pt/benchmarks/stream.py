"""A long stream through a model, its state carried along: speed and memory against the number of tokens read."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titans_pt.benchmarks.process import peak_mib, write_about, write_csv
from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.layers.state import state_bytes
from titans_pt.models import build_model
from titans_pt.streaming import best_device, prefill
from titans_pt.tools.files import write_text
from titans_pt.tools.markdown import markdown_table
from titans_pt.tools.plots import from_zero, new_figure, own_style, save_figure

TURNS = 15


@dataclass
class StretchFigures:
    """Figures of a stretch. tokens: tokens read by its end. tokens_per_second: speed in the stretch. peak_mib: peak
    allocation so far (on a CPU, peak of the process). state_mib: size of the state that is passed on."""

    tokens: int
    tokens_per_second: float
    peak_mib: float
    state_mib: float


def benchmark_stream(out: Path, config: Config, tokens: int, stretches: int):
    """Read a stream, print a table and write ``out``/stream.{md,csv,json,png}.

    The stream is one row of random tokens, read in pieces of evaluation.prefill_tokens. Weights are untrained (speed
    and memory do not depend on them), in bf16 on a GPU and fp32 on a CPU. One extra stretch warms up. A machine's speed
    drifts in the minutes that this takes. Therefore short stretches at the start and at the end of the stream are timed
    in turns afterwards, TURNS times.

    Raises:
        UserError: fewer tokens than stretches.
    """
    if tokens < stretches:
        raise UserError(f"--tokens: given {tokens}; at least the {stretches} stretches of --stretches")
    out.mkdir(parents=True, exist_ok=True)
    found, ratio = read(config, tokens // stretches, stretches)
    text = table(found, ratio)
    write_text(out / "stream.md", text)
    write_csv(out / "stream.csv", found)
    write_about(out / "stream.json", model=config.model.model_dump(mode="json"))
    plot(found, out / "stream.png")
    print(f"\n{text}\n{out / 'stream.md'}")


def read(config: Config, stretch: int, count: int) -> tuple[list[StretchFigures], float]:
    """Read ``count`` stretches of ``stretch`` tokens, one after the other, after one that is not counted.

    Returns their figures, and the time of a short stretch at the end divided by its time at the start (median).
    """
    device = torch.device(best_device())
    torch.manual_seed(0)
    model = build_model(config.model).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    model.blocks.set_wavefront(config.evaluation.wavefront)
    piece = config.evaluation.prefill_tokens

    def timed(tokens: int, state: Any) -> tuple[float, Any]:
        ids = torch.randint(0, config.model.vocab_size, (1, tokens), dtype=torch.int32)
        began = time.perf_counter()
        logits, state = prefill(model, ids, piece, state)
        logits.sum().item()  # waits for the device
        return time.perf_counter() - began, state

    found, state = [], None
    for n in range(count + 1):
        seconds, state = timed(stretch, state)
        if n:
            found.append(StretchFigures(n * stretch, stretch / seconds, peak_mib(device), state_bytes(state) / 2**20))
            print(table(found[-1:]).splitlines()[-1], flush=True)
    short = min(stretch, 8 * piece)
    _, start = timed(short, None)
    turns = [timed(short, state)[0] / timed(short, start)[0] for _ in range(TURNS)]
    return found, statistics.median(turns)


def table(found: list[StretchFigures], ratio: float | None = None) -> str:
    """Markdown, one line per stretch; with ``ratio``, also the differences between stretches."""
    rows = [(f"{s.tokens:,}", f"{s.tokens_per_second:,.0f}", f"{s.peak_mib:.1f}", f"{s.state_mib:.2f}") for s in found]
    lines = [markdown_table(("tokens", "tokens/s", "peak MiB", "state MiB"), rows)]
    if ratio is not None:
        speeds, peaks = [s.tokens_per_second for s in found], [s.peak_mib for s in found]
        mean = len(speeds) / sum(1 / speed for speed in speeds)
        lines.append(
            f"\nmean {mean:,.0f} tokens/s, stretches {100 * (min(speeds) / mean - 1):+.1f} % to "
            f"{100 * (max(speeds) / mean - 1):+.1f} %; peak memory +{100 * (peaks[-1] / peaks[0] - 1):.2f} % from the "
            f"first to the last\nin turns, {TURNS} times: a stretch at the end takes {ratio:.3f} of the time that one "
            "at the start takes (median)"
        )
    return "\n".join(lines) + "\n"


@own_style()
def plot(found: list[StretchFigures], path: Path):
    """Speed and peak memory against the tokens read, both from zero."""
    figure = new_figure(7.0, 4.8)
    speed, memory = figure.subplots(2, sharex=True)
    tokens = [s.tokens for s in found]
    speed.plot(tokens, [s.tokens_per_second for s in found], marker="o")
    speed.set_ylabel("tokens / s")
    memory.plot(tokens, [s.peak_mib for s in found], marker="o", color="tab:orange")
    memory.set_ylabel("peak MiB")
    memory.set_xlabel("tokens read")
    memory.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (speed, memory):
        from_zero(axes)
        axes.grid(alpha=0.3)
    save_figure(figure, path)
