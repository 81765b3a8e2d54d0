"""The kernels' benchmark measures what it says, refuses what is wrong, and leaves its files."""

import csv
import json

import pytest
import torch

from titans_pt.benchmarks import kernels
from titans_pt.benchmarks.kernels import COMPILED
from titans_pt.errors import UserError
from titans_pt.kernels.memory import dual


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every column has figures")
def test_on_a_cpu_only_the_chunked_form_is_timed(tmp_path, capsys):
    kernels.benchmark_kernels(tmp_path, rounds=1, longest=128, tokens=256)
    rows = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    assert {r["implementation"] for r in rows} == {name for name, *_ in kernels.implementations()}
    for row in rows:
        if row["implementation"] == "chunked":
            assert float(row["both_ms"]) > 0 and float(row["forward_ms"]) > 0 and not row["note"]
            assert float(row["tokens_per_second"]) == pytest.approx(256e3 / float(row["both_ms"]))
        else:
            assert not row["both_ms"] and row["note"]
    assert (tmp_path / "kernels.md").read_text().strip() in capsys.readouterr().out
    assert json.loads((tmp_path / "kernels.json").read_text())["matmul_tflops"] > 0
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_what_fails_its_check_is_not_timed(tmp_path, monkeypatch):
    def wrong(x):
        right = kernels.memory_call("chunked", x)
        return lambda: right() * 1.1

    monkeypatch.setattr(kernels, "implementations", lambda: [("chunked", 2, wrong, 64)])
    with pytest.raises(UserError, match="nothing was measured: all 1 rows failed; the first: wrong: outputs off by"):
        kernels.benchmark_kernels(tmp_path, rounds=1, longest=128, tokens=128)
    (row,) = csv.DictReader((tmp_path / "kernels.csv").open())
    assert row["note"].startswith("wrong: outputs off by") and not row["both_ms"]


def test_limits_are_what_roundings_cost(monkeypatch):
    """In bf16, the error of one rounding passes and that of ten does not; limits rest on the case's own figures."""
    monkeypatch.setattr(kernels, "CHECKED", 40)

    def rounded(times):
        def build(x):
            noise = 1 + times * 2**-8 * torch.randn(x["q"].shape, generator=torch.Generator().manual_seed(7))
            return lambda: (kernels.memory_call("chunked", x)() * noise).to(x["q"])

        return build

    check = lambda build: kernels._check("triton", 2, build, 16, "cpu", torch.bfloat16)  # noqa: E731
    assert check(lambda x: kernels.memory_call("chunked", x, 16)) == ""
    x = kernels.inputs(1, 40, 2, "cpu", torch.bfloat16)
    seed = torch.randn(x["q"].shape, generator=torch.Generator().manual_seed(1))
    exact = kernels._exact(x, 16, seed)
    limits = kernels._limits(x, exact, 16, seed)
    assert len(limits) == 11 and min(limits) == 1e-2 and max(limits) < 0.3
    assert check(rounded(10)).startswith("wrong: outputs off by")


def test_the_fla_row_asks_our_dispatch(monkeypatch):
    """The row gives the reason if flash-linear-attention would raise, or be wrong."""
    monkeypatch.setattr("titans_pt.kernels.linear_memory.dispatch.unsupported", lambda *_: "triton 3.6.0 is wrong here")
    (build,) = [build for name, _, build, _ in kernels.implementations() if name == "fla gated_delta_rule"]
    with pytest.raises(ValueError, match="triton 3.6.0 is wrong here"):
        build(kernels.inputs(1, 8, 1, "cpu", torch.bfloat16))()


@pytest.mark.slow
def test_the_compiled_dual_form_passes_its_check(monkeypatch):
    used, plain = [], dual.read

    def compiled(function, **options):
        used.append(function.__qualname__)
        return compile_(function, backend="aot_eager", **options)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    (build,) = [build for name, expansion, build, _ in kernels.implementations() if (name, expansion) == (COMPILED, 2)]
    with kernels.compiled_blocks():
        assert kernels._check(COMPILED, 2, build, 64, "cpu", torch.float32) == ""
    assert used == list(kernels.BLOCK) and dual.read is plain


def test_gated_delta_rule_is_checked_against_its_recurrence():
    """One token gives q . k (beta (v - 0)); a second token with the same key corrects what the first left."""
    x = kernels.inputs(1, 2, 1, "cpu", torch.float64)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    out = kernels._delta_recurrence(x)
    score, beta = (x["q"] * x["k"]).sum(-1, keepdim=True), x["eta"].unsqueeze(-1)
    first = beta[:, 0] * x["v"][:, 0]
    kept = (1 - x["alpha"][:, 1].unsqueeze(-1)) * first
    torch.testing.assert_close(out[:, 0], score[:, 0] * first, check_dtype=False)
    torch.testing.assert_close(out[:, 1], score[:, 1] * (kept + beta[:, 1] * (x["v"][:, 1] - kept)), check_dtype=False)
