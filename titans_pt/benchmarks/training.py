"""The whole training step on this machine: models, lengths, memory depths and chunk sizes, at equal tokens per step.

Titans, Figure 9 (throughput against the length) and Figure 8 (against the memory's depth). The step is that of
``titans train``: the same engine, forward and backward pass, clipping, AdamW. Every case runs in a separate process.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from titans_pt.benchmarks.process import check_any, peak_mib, write_about, write_csv
from titans_pt.config import Config
from titans_pt.config.files import check_free, load_config
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.models.backbone import check_packages
from titans_pt.models.mixers import MIXERS
from titans_pt.models.mixers.common import MemoryMixer
from titans_pt.tasks import task_of
from titans_pt.tools.files import write_text
from titans_pt.tools.markdown import markdown_table
from titans_pt.tools.plots import from_zero, legend, new_figure, own_style, powers_of_two, save_figure
from titans_pt.training.metrics import peak_flops
from titans_pt.training.profiling import start_profile, time_shares

DEPTHS, CHUNKS = (1, 2, 3, 4), (4, 16, 64, 256)
SET = {"data.seq_len": "give --lengths N,...", "train.batch_tokens": "give --tokens N",
       "train.micro_batch": "give --tokens N: a step is one micro-batch"}  # fmt: skip
"""Settings that each case sets -> what to do in place of setting them."""
STEPS = 5
"""Timed steps per case, after two warm-up steps; the median counts."""


@dataclass
class Case:
    """model: name of a mixer or of a config, or "transformer". length: tokens per sequence. depth, chunk: the memory's
    depth and chunk size; None: as configured."""

    model: str
    length: int
    depth: int | None = None
    chunk: int | None = None


@dataclass
class Measurement:
    """tokens_per_second: speed of the median step. mfu: None if the device's peak is not known.

    peak_mib: peak allocation (on a CPU, peak of the process). shares: see profiling.time_shares. failure: reason why
    there are no figures.
    """

    model: str
    length: int
    depth: int | None
    chunk: int | None
    parameters: int = 0
    tokens_per_second: float = 0.0
    mfu: float | None = None
    peak_mib: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def benchmark_training(
    out: Path, config: str, overrides: list[str], models: list[str], lengths: list[int], tokens: int, sweeps: bool
):
    """Time training steps, print a table and write ``out``/training.{md,csv,json,png}.

    Args:
        config: path of a YAML file; {model} in it becomes the model's name. Without {model}, model.mixers is set.
        overrides: key=value words for every case.
        tokens: tokens per step, B * T, at every length.
        sweeps: whether to time also the memory's depths and chunk sizes, at the middle length.

    Raises:
        UserError: a length does not divide ``tokens``; an override of what a case sets; no case could be measured.
    """
    check_free(overrides, SET | {"model.mixers": "give --models NAMES"})
    for length in lengths:
        if tokens % length:
            raise UserError(f"--tokens: given {tokens}; must be a multiple of {length}, which --lengths names")
    out.mkdir(parents=True, exist_ok=True)
    cases = [Case(model, length) for length in lengths for model in models]
    if sweeps:
        middle = lengths[len(lengths) // 2]
        titans = [m for m in models if _has_memory(Case(m, middle), config, overrides, tokens)]
        cases += [Case(m, middle, depth=depth) for depth in DEPTHS for m in titans]
        cases += [Case(m, middle, chunk=chunk) for chunk in CHUNKS for m in titans]
    write_about(out / "training.json", config=config, overrides=overrides, tokens=tokens)
    found = []
    for case in cases:
        found.append(in_a_process(case, config, overrides, tokens, out))
        print(table(found[-1:]).splitlines()[-1], flush=True)
        _write(found, out)  # after every case: a benchmark that is cut short leaves its results
    print(f"\n{table(found)}\n{out / 'training.md'}")
    check_any([m.failure for m in found])


def _write(found: list[Measurement], out: Path):
    write_text(out / "training.md", table(found))
    write_csv(out / "training.csv", found)
    plot([m for m in found if m.depth is None and m.chunk is None and not m.failure], out / "training.png")


def table(found: list[Measurement]) -> str:
    """Markdown, one line a measurement."""
    columns = ("model", "T", "L_M", "C", "parameters", "tokens/s", "MFU", "peak MiB", "time")
    rows = []
    for m in found:
        head = (m.model, f"{m.length:,}", m.depth or "", m.chunk or "")
        if m.failure:
            rows.append((*head, "", "", "", "", m.failure))
            continue
        mfu = "" if m.mfu is None else f"{100 * m.mfu:.1f} %"
        shares = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in list(m.shares.items())[:4])
        rows.append((*head, f"{m.parameters:,}", f"{m.tokens_per_second:,.0f}", mfu, f"{m.peak_mib:,.0f}", shares))
    return markdown_table(columns, rows) + "\n"


@own_style()
def plot(found: list[Measurement], path: Path):
    """Tokens per second against the length, one line per model."""
    figure = new_figure(7.0, 4.2)
    axes = figure.subplots()
    models, drawn = list(dict.fromkeys(m.model for m in found)), []
    for model in models:
        points = [(m.length, m.tokens_per_second) for m in found if m.model == model]
        drawn += axes.plot(*zip(*points, strict=True), marker="o")
    powers_of_two(axes)
    from_zero(axes)
    axes.set_xlabel("tokens per sequence, at equal tokens per step")
    axes.set_ylabel("training tokens / s")
    axes.grid(alpha=0.3)
    if found:
        legend(axes, drawn, models)
    save_figure(figure, path)


# ---- one case, in its own process


def in_a_process(case: Case, config: str, overrides: list[str], tokens: int, out: Path | None = None) -> Measurement:
    """Measure a case in a separate process. ``out`` gets a log: the kernels of a step by time, or the whole error."""
    arguments = json.dumps([asdict(case), config, overrides, tokens, torch.get_num_threads()])
    words = [sys.executable, "-m", "titans_pt.benchmarks.training", arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    parts = (case.model, case.length, case.depth and f"depth-{case.depth}", case.chunk and f"chunk-{case.chunk}")
    if out:
        write_text(out / f"{'-'.join(str(part) for part in parts if part)}.log", done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        last = last.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")
        return Measurement(**asdict(case), failure="out of memory" if "OutOfMemoryError" in last else last[:200])
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def case_config(case: Case, config: str, more: list[str], tokens: int) -> Config:
    """Settings of a case: the file's, then ``more``, then the case's own; one micro-batch per step.

    Raises:
        UserError: wrong settings, or another task than language.
    """
    overrides = [*more, f"data.seq_len={case.length}", f"train.batch_tokens={tokens}", f"train.micro_batch={tokens}"]
    if "{model}" not in config:
        overrides.append(f"model.mixers=[{'attention' if case.model == 'transformer' else case.model}]")
    if case.depth:
        overrides.append(f"model.memory.depth={case.depth}")
    if case.chunk:
        overrides.append(f"model.memory.chunk_size={case.chunk}")
    found = load_config(config.replace("{model}", case.model), overrides)
    if found.task != "language":
        raise UserError(f"task: given {found.task!r}; steps are timed on random tokens by task=language; give "
                        "task=language train.stop_when=null")  # fmt: skip
    return found


def _has_memory(case: Case, config: str, more: list[str], tokens: int) -> bool:
    """Whether the memory's depth and chunk size matter to the model; False for wrong settings, which the model's own
    row reports."""
    try:
        kinds = case_config(case, config, more, tokens).model.kinds
    except UserError:
        return False
    return any(issubclass(MIXERS.find(kind), MemoryMixer) for kind in kinds)


def measure(case: Case, config: Config) -> Measurement:
    """Trains for a few steps on random tokens."""
    from titans_pt.training.engine import Engine
    from titans_pt.training.ranks import process_group

    with process_group() as ranks:
        torch.manual_seed(0)
        model = build_model(config.model)
        check_packages(model.blocks, ranks.device)
        parameters = sum(p.numel() for p in model.parameters())
        engine = Engine(task_of(config), model, ranks)
        engine.set_lr(1e-4)
        tokens = config.train.batch_tokens
        shape = (tokens // config.data.seq_len, config.data.seq_len)
        ids = torch.randint(0, config.model.vocab_size, shape, device=ranks.device)

        def step() -> float:
            began = time.perf_counter()
            loss = engine.micro_step((ids, None))
            float(loss)  # waits for the device
            return time.perf_counter() - began

        for _ in range(2):
            step()
        seconds = statistics.median(step() for _ in range(STEPS))
        peak = peak_mib(ranks.device)
        profiler = start_profile()
        step()
        profiler.stop()
        kind = "cuda" if ranks.device.type == "cuda" else "cpu"
        by_kernel = profiler.key_averages().table(f"self_{kind}_time_total", row_limit=40, max_name_column_width=80)
        print(by_kernel, file=sys.stderr)
        roof = peak_flops(ranks.device)
        with torch.device("meta"):
            flops = build_model(config.model).flops(config.data.seq_len).total
        speed = tokens / seconds
        mfu = speed * flops / roof if roof else None
        return Measurement(
            **asdict(case), parameters=parameters, tokens_per_second=speed, mfu=mfu, peak_mib=peak,
            shares=time_shares(profiler),
        )  # fmt: skip


if __name__ == "__main__":
    _case, _config, _overrides, _tokens, _threads = json.loads(sys.argv[1])
    torch.set_num_threads(_threads)
    _case = Case(**_case)
    print(json.dumps(asdict(measure(_case, case_config(_case, _config, _overrides, _tokens)))))
