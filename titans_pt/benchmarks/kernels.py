"""The memory's kernels on this machine, compared with other implementations, other operators and the machine's limits.

All implementations get the same batch, length, heads and head width. An implementation is timed only after it has
passed its check. If it cannot run or does not pass, the table has the reason in place of figures.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from titans_pt.benchmarks.process import check_any, named, write_about, write_csv
from titans_pt.kernels.linear_memory import linear_memory
from titans_pt.kernels.memory import dual, neural_memory
from titans_pt.tools.files import write_text
from titans_pt.tools.markdown import markdown_table
from titans_pt.tools.plots import new_figure, own_style, save_figure

HEADS, WIDTH, CHUNK, EXPANSIONS = 12, 64, 64, (2, 4)
SMALL_CHUNKS = (16, 4)
"""Further chunk sizes of the fused kernels; all other figures are for CHUNK."""
LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
COMPILED = "chunked, compiled"
CHECKED = 200
"""Tokens of the correctness check, one row."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative error allowed to every implementation, by the operands' dtype; :func:`_limits` allows more if rounding costs
more. Outputs are compared without the residual, which would make errors look smaller."""
DRAWS = 3
"""Random roundings of the inputs that :func:`_limits` tries."""


@dataclass
class KernelTiming:
    """One implementation at one length; figures are None if ``note`` has a reason.

    tflops, gigabytes: rates per second of forward + backward; :func:`work` counts their operations and bytes.
    """

    implementation: str
    hidden: int
    length: int
    batch: int
    forward_ms: float | None = None
    both_ms: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    gigabytes: float | None = None
    peak_mib: float | None = None
    note: str = ""


def benchmark_kernels(out: Path, rounds: int = 3, longest: int = LENGTHS[-1], tokens: int = 32_768):
    """Time all implementations, print a Markdown table and write kernels.{md,csv,json,png} to ``out``.

    tokens: tokens per call, batch times length. longest: limit of the lengths; LENGTHS up to it are measured, or
    ``longest`` itself if all of them are longer. rounds: timings of each call after a warm-up; the median counts.

    Raises:
        UserError: no implementation could be timed.
    """
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    longest = min(longest, tokens)
    lengths = sorted({n for n in LENGTHS if n <= longest} | ({longest} if longest < LENGTHS[0] else set()))
    rows = []
    ceilings = measured_ceilings(device, dtype)
    title = (
        f"D = {WIDTH}, {HEADS} heads, C = {CHUNK}, {tokens:,} tokens per call, "
        f"{str(dtype).removeprefix('torch.')}; matmul {ceilings['matmul_tflops']:.1f} TFLOP/s, "
        f"copy {ceilings['copy_gigabytes']:.0f} GB/s"
    )
    write_about(out / "kernels.json", **_fla_version(), **ceilings)
    for name, expansion, build, chunk in implementations():
        with compiled_blocks() if name == COMPILED else nullcontext():
            reason = _reason(name, expansion, build, chunk, device, dtype)
            for length in lengths:
                row = KernelTiming(name, WIDTH * expansion, length, tokens // length, note=reason)
                rows.append(_timed(row, build, expansion, device, dtype, rounds) if not reason else row)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        # After every implementation: a benchmark that is cut short leaves its results.
        write_text(out / "kernels.md", f"{title}\n\n{table(rows)}\n")
        write_csv(out / "kernels.csv", rows)
        _plot(rows, out / "kernels.png", title)
    print(f"\n{title}\n\n{table(rows)}\n\n{out / 'kernels.md'}")
    check_any([row.note if row.both_ms is None else "" for row in rows])


def implementations():
    """Yield (name, expansion, build, chunk); build(inputs) is a function without arguments that returns outputs."""
    for chunk in (CHUNK, *SMALL_CHUNKS):  # several small chunks share a block, and their writes are deferred
        name = "triton" if chunk == CHUNK else f"triton, C = {chunk}"
        for expansion in EXPANSIONS:
            yield name, expansion, partial(memory_call, "triton", chunk=chunk), chunk
    # Linear memories: hidden = D means that they have no hidden layer.
    yield "fla gated_delta_rule", 1, _gated_delta_rule, CHUNK
    yield "fla ttt_linear", 1, _ttt_linear, CHUNK
    for name in (COMPILED, "chunked"):  # last: a call of the dual form takes as long as all of the others
        for expansion in EXPANSIONS:
            yield name, expansion, partial(memory_call, "chunked"), CHUNK


def inputs(batch: int, length: int, expansion: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random q, k, v (unit keys), stable gates, M_0 and LayerNorm; all differentiable leaves."""
    draw = torch.Generator(device).manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=draw, device=device)

    q, k = (normalize(rand(batch, length, HEADS, WIDTH), dim=-1).to(dtype) for _ in range(2))
    theta, eta, alpha = (torch.sigmoid(rand(batch, length, HEADS)) for _ in range(3))
    found = {
        "q": q, "k": k, "v": rand(batch, length, HEADS, WIDTH).to(dtype),
        "theta": 1.9 / CHUNK * (1 - eta) * theta, "eta": eta, "alpha": 0.01 * alpha,
        "w1": rand(HEADS, WIDTH, expansion * WIDTH), "w2": rand(HEADS, expansion * WIDTH, WIDTH),
        "gain": torch.ones(HEADS, WIDTH, device=device), "shift": torch.zeros(HEADS, WIDTH, device=device),
    }  # fmt: skip
    return {name: x.detach().requires_grad_() for name, x in found.items()}


def memory_call(backend: str, x: dict[str, Tensor], chunk: int = CHUNK) -> Callable[[], Tensor]:
    gates = x["theta"], x["eta"], x["alpha"]

    def run():
        return neural_memory(
            x["q"], x["k"], x["v"], *gates, (x["w1"], x["w2"]), norm=(x["gain"], x["shift"]), chunk_size=chunk,
            backend=backend, forget_to="start",
        )[0]  # fmt: skip

    return run


BLOCK = ("key_side", "read", "read_backward", "write_backward", "key_side_backward")
"""The functions of a block of the dual form."""


@contextmanager
def compiled_blocks():
    """Context in which torch.compile compiles the dual form's blocks, forward and backward.

    The whole dual form is not compiled, because its loop over blocks would be unrolled.
    """
    plain = {name: getattr(dual, name) for name in BLOCK}
    for name, function in plain.items():
        setattr(dual, name, torch.compile(function, dynamic=False))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dual, name, function)


def _gated_delta_rule(x: dict[str, Tensor]) -> Callable[[], Tensor]:
    # eta serves as the step size, alpha as the decay: all numbers in (0, 1) take equally long. linear_memory reports
    # the versions of triton whose kernels are wrong.
    return lambda: linear_memory(x["q"], x["k"], x["v"], torch.log1p(-x["alpha"]), x["eta"], backend="fla")[0]


def _ttt_linear(x: dict[str, Tensor]) -> Callable[[], Tensor]:
    from fla.ops.ttt import chunk_ttt_linear

    return lambda: chunk_ttt_linear(
        x["q"], x["k"], x["v"], x["gain"].to(x["q"]), x["shift"].to(x["q"]), x["theta"].unsqueeze(-1).to(x["q"]),
        scale=1.0,
    )[0]  # fmt: skip


def work(length: int, batch: int, expansion: int, itemsize: int) -> tuple[float, float]:
    """Minimum operations and bytes of forward + backward in the two-layer memory, without its states.

    Forward, per token and head: 11 products of 2 D h (3 on the keys' side, 4 for the queries through W and S, 4 for the
    update of W and S) and 4 c (D + h) inside a block of c = 64; backward: twice as many. Bytes: q, k, v, outputs and
    gates; in the backward pass the same tensors and their gradients.
    """
    hidden = WIDTH * expansion
    operations = 3 * (22 * WIDTH * hidden + 4 * CHUNK * (WIDTH + hidden))
    traffic = 3 * (4 * WIDTH * itemsize + 3 * 4)
    return operations * length * batch * HEADS, traffic * length * batch * HEADS


def _reason(name: str, expansion: int, build, chunk: int, device: str, dtype: torch.dtype) -> str:
    """Reason why an implementation cannot be timed; empty if it can."""
    if name.startswith("fla") and find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    if name.startswith(("fla", "triton")) and device != "cuda":
        return "no GPU"
    if name == COMPILED and device != "cuda":
        return "compiled only on a GPU"
    try:
        return _check(name, expansion, build, chunk, device, dtype)
    except Exception as error:  # noqa: BLE001 - any error becomes the note of its row; the other rows are still measured
        return named(error)


def _check(name: str, expansion: int, build, chunk: int, device: str, dtype: torch.dtype) -> str:
    """Error of an implementation's outputs and gradients on a short call; empty if there is none.

    The memory is compared with the dual form in float64. Outputs of the gated delta rule are compared with its
    recurrence. TTT must be finite.
    """
    x = inputs(1, CHECKED, expansion, device, dtype)
    out = build(x)()
    seed = torch.randn(out.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    # Copies: a gradient may be a view of a buffer that a compiled graph uses again.
    grads = [g.double().clone() for g in torch.autograd.grad((out.float() * seed).sum(), _used(name, x))]
    if not all(t.isfinite().all() for t in (out, *grads)):
        return "not finite"
    if name == "fla ttt_linear":
        return ""
    if name == "fla gated_delta_rule":
        error = _error(out.double(), _delta_recurrence(x))
        return "" if error < TOLERANCES[dtype] else f"wrong: outputs off by {error:.1e}"
    names = ["outputs", *(f"gradient of {n}" for n in x)]
    exact = _exact(x, chunk, seed)
    ours = [out.double() - x["q"].double(), *grads]
    for what, a, b, limit in zip(names, ours, exact, _limits(x, exact, chunk, seed), strict=True):
        if not (error := _error(a, b)) < limit:
            return f"wrong: {what} off by {error:.1e}, allowed {limit:.1e}"
    return ""


def _exact(x: dict[str, Tensor], chunk: int, seed: Tensor, rounded: int | None = None) -> list[Tensor]:
    """Outputs without the residual, and all gradients, of the dual form in float64.

    rounded: number of a random draw. It changes all inputs but the gates, which are fp32 everywhere, by at most a
    rounding to q's dtype; results that have this dtype are rounded to it.
    """
    dtype, exact = x["q"].dtype, {name: t.detach().double() for name, t in x.items()}
    if rounded is not None:
        draw = torch.Generator(seed.device).manual_seed(rounded)
        for name in [name for name in exact if name not in ("theta", "eta", "alpha")]:
            noise = 2 * torch.rand(exact[name].shape, generator=draw, device=seed.device, dtype=torch.float64) - 1
            exact[name] = exact[name] * (1 + torch.finfo(dtype).eps / 2 * noise)
    exact = {name: t.requires_grad_() for name, t in exact.items()}
    with torch.compiler.set_stance("force_eager"):
        out = memory_call("chunked", exact, chunk)()
        grads = torch.autograd.grad((out * seed.double()).sum(), list(exact.values()))
    if rounded is not None:
        out, grads = out.to(dtype), tuple(g.to(t.dtype) for g, t in zip(grads, x.values(), strict=True))
    return [out.detach().double() - exact["q"].detach(), *(g.double() for g in grads)]


def _limits(x: dict[str, Tensor], exact: list[Tensor], chunk: int, seed: Tensor) -> list[float]:
    """Largest error allowed for each of ``exact``: three times the change of the dual form in float64 when its inputs
    and results are rounded to q's dtype, and at least TOLERANCES."""
    moved = [[_error(a, b) for a, b in zip(_exact(x, chunk, seed, n), exact, strict=True)] for n in range(DRAWS)]
    return [max(TOLERANCES[x["q"].dtype], 3 * max(errors)) for errors in zip(*moved, strict=True)]


def _used(name: str, x: dict[str, Tensor]) -> list[Tensor]:
    """Inputs that an implementation differentiates."""
    if name == "fla gated_delta_rule":
        return [x[n] for n in ("q", "k", "v", "alpha", "eta")]
    if name == "fla ttt_linear":
        return [x[n] for n in ("q", "k", "v", "theta")]
    return list(x.values())


def _error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def _delta_recurrence(x: dict[str, Tensor]) -> Tensor:
    q, k, v, keep, beta = (x[n].double() for n in ("q", "k", "v", "alpha", "eta"))
    state = q.new_zeros(q.shape[0], HEADS, WIDTH, WIDTH)
    outputs = []
    for t in range(q.shape[1]):
        state = (1 - keep[:, t, :, None, None]) * state
        error = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state).squeeze(-2))
        state = state + k[:, t, :, :, None] * error[..., None, :]
        outputs.append((q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1)


def _timed(row: KernelTiming, build, expansion: int, device: str, dtype: torch.dtype, rounds: int) -> KernelTiming:
    x = inputs(row.batch, row.length, expansion, device, dtype)
    run, used = build(x), _used(row.implementation, x)
    seed = torch.randn_like(x["q"])

    def both():
        torch.autograd.grad(run(), used, seed)

    try:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
        row.both_ms = milliseconds(both, device, rounds)
        if device == "cuda":
            row.peak_mib = (torch.cuda.max_memory_allocated() - start) / 2**20
        with torch.no_grad():
            row.forward_ms = milliseconds(run, device, rounds)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
        return row
    seconds = row.both_ms / 1e3
    row.tokens_per_second = row.batch * row.length / seconds
    if not row.implementation.startswith("fla"):
        operations, traffic = work(row.length, row.batch, expansion, dtype.itemsize)
        row.tflops, row.gigabytes = operations / seconds / 1e12, traffic / seconds / 1e9
    return row


def milliseconds(function, device: str, rounds: int) -> float:
    """Median time of a call, the first one left out."""
    times = []
    for n in range(rounds + 1):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end)
        else:
            began = time.perf_counter()
            function()
            taken = 1e3 * (time.perf_counter() - began)
        if n:
            times.append(taken)
    return statistics.median(times)


def measured_ceilings(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Ceilings of this machine: a large matrix product (TFLOP/s), a large copy (GB/s, read and written)."""
    n, size = (8192, 1 << 30) if device == "cuda" else (512, 1 << 24)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    matmul = milliseconds(lambda: a @ b, device, 10)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), device, 10)
    return {"matmul_tflops": 2 * n**3 / matmul / 1e9, "copy_gigabytes": 2 * size / copy / 1e6}


def table(rows: list[KernelTiming]) -> str:
    """The rows as Markdown."""
    heads = ["implementation", "hidden", "T", "B", "forward ms", "forward + backward ms", "tokens/s", "TFLOP/s", "GB/s",
             "peak MiB", "note"]  # fmt: skip
    return markdown_table(heads, [[_cell(value) for value in asdict(row).values()] for row in rows])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


@own_style()
def _plot(rows: list[KernelTiming], path: Path, title: str):
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for name, hidden in dict.fromkeys((r.implementation, r.hidden) for r in rows):
        points = [(r.length, r.tokens_per_second) for r in rows
                  if (r.implementation, r.hidden) == (name, hidden) and r.tokens_per_second]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{name}, hidden {hidden}")
    axes.set(xlabel="T (tokens)", ylabel="tokens/s, forward + backward")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    save_figure(figure, path, dpi=120)


def _fla_version() -> dict[str, str]:
    from importlib import metadata

    # fla-core is the distribution that has the operators.
    return {"fla-core": metadata.version("fla-core")} if find_spec("fla") else {}
